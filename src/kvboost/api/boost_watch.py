"""What must not change between two calls of a boosted model for its stored KV to stay true: weights, hooks, adapters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
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


def weights_state(model: PreTrainedModel) -> Hashable:
    """Equal before and after means: no optimizer has stepped, and no parameter was replaced or written to.

    Writes through `parameter.data` have no version; one value out of the middle of each parameter is read for them.
    """
    names: list[tuple[int, int]] = []
    middles: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for parameter in model.parameters():
            names.append((parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version))
            if parameter.numel() and parameter.device.type != "meta":
                middles[parameter.device].append(parameter[tuple(size // 2 for size in parameter.shape)].float())
        values = [torch.stack(found).tolist() for found in middles.values()]
    return _optimizers.count, tuple(names), tuple(itertools.chain.from_iterable(values))


def has_foreign_hooks(model: PreTrainedModel) -> bool:
    """Whether someone listens to or changes activations. Transformers' own capturing hooks sleep in a step."""
    for module in model.modules():
        for hook in itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return True
    return False


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether PEFT adapters are on the model: they are switched without a trace on the weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
