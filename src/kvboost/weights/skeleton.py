"""A model without weights: parameters on the meta device, everything that no file holds computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost.errors import UnsupportedModel
from kvboost.weights.replace import is_plain_table


@torch.no_grad()
def build_skeleton(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of `config` in `dtype`: parameters are meta tensors for the caller to replace, buffers are on `device`.

    Raises `UnsupportedModel` when a buffer's values are not known to the model's own initialisation.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for key, buffer in buffers.items():
            module._buffers[key] = _unset(buffer, device)
        if buffers:
            model._init_weights(module)  # rotary frequencies, scales of embeddings; of meta parameters nothing
        for key in buffers:
            if _is_unset(module._buffers[key]):
                raise UnsupportedModel(
                    f"{type(model).__name__}: nothing sets the buffer {name}.{key} of {type(module).__name__} but its "
                    "constructor, so the model cannot be built around packed weights. Use weights='dense'."
                )
    return model.eval().requires_grad_(False)


class Slots:
    """The parameters of a model and the modules that hold each; a tied weight has two and is one parameter here.

    Parameters that are put in, and modules that are replaced, are replaced everywhere they stand.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[str, list[tuple[nn.Module, str, nn.Module, str]]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        first: dict[nn.Parameter, str] = {}
        for path, module in model.named_modules():
            parent_path, _, child = path.rpartition(".")
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = first.setdefault(parameter, f"{path}.{key}" if path else key)
                self._parameters[name] = parameter
                holder = (model.get_submodule(parent_path), child, module, key)
                self._holders.setdefault(name, []).append(holder)

    @property
    def names(self) -> list[str]:
        return list(self._holders)

    def parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]

    def packable(self, name: str) -> bool:
        """Whether it is the weight of plain linears and embeddings only."""
        return all(
            key == "weight" and (type(module) is nn.Linear or is_plain_table(module))
            for _, _, module, key in self._holders[name]
        )

    def put(self, name: str, parameter: nn.Parameter) -> None:
        for parent, child, module, key in self._holders[name]:
            _present(parent, child, module)._parameters[key] = parameter

    def replace(self, name: str, made: Callable[[nn.Module], nn.Module]) -> None:
        """Put `made(module)` where each module with this weight stands."""
        for parent, child, module, _ in self._holders[name]:
            parent._modules[child] = made(_present(parent, child, module))


def _present(parent: nn.Module, child: str, module: nn.Module) -> nn.Module:
    """What now stands in the place of `module`: a weight may be replaced before its bias is put in."""
    return parent._modules[child] or module if child else module


def _unset(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    mark = float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max
    return torch.full(buffer.shape, mark, dtype=buffer.dtype, device=device)


def _is_unset(buffer: Any) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return bool((buffer == torch.iinfo(buffer.dtype).max).all())
