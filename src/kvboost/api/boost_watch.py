"""What must not change between two calls of a boosted model for its stored KV to stay true: weights, hooks, adapters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel


class _OptimizerSteps:
    """Counts the steps of every optimizer in this process: fused ones leave no trace on a parameter's version."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


_optimizers = _OptimizerSteps()


@dataclass(frozen=True)
class Survey:
    """One walk over the modules (1 ms for 300 parameters, which is why there is one walk and not two).

    foreign_hooks: someone listens to or changes activations. Transformers' own capturing hooks, which stay behind once
    hidden states were asked for, sleep in a step.
    """

    parameters: list[Tensor]
    foreign_hooks: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Survey:
        parameters: list[Tensor] = []
        hooks: list[Any] = []
        for module in model.modules():
            parameters += [p for p in module._parameters.values() if p is not None]
            hooks += module._forward_hooks.values()
            hooks += module._forward_pre_hooks.values()
        foreign = [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith("transformers.")]
        return cls(parameters, bool(foreign))

    def weights_state(self) -> Hashable:
        """Equal before and after means: no optimizer has stepped, and no parameter was replaced or written to.

        Writes through `parameter.data` have no version; one value out of the middle of each parameter is read for them.
        """
        versions = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters)
        middles: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.inference_mode():
            for p in self.parameters:
                if p.numel() and p.device.type != "meta":
                    middles[p.device, p.dtype].append(_middle(p))
            values = [torch.cat(found).tolist() for found in middles.values()]
        return _optimizers.count, versions, tuple(itertools.chain.from_iterable(values))


def _middle(parameter: Tensor) -> Tensor:
    if parameter.is_contiguous():  # a third of the time of indexing
        return parameter.as_strided((1,), (1,), parameter.storage_offset() + parameter.numel() // 2)
    return parameter[tuple(size // 2 for size in parameter.shape)].reshape(1)


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether PEFT adapters are on the model: they are switched without a trace on the weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
