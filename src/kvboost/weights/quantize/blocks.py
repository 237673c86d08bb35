"""The decoder layers of a model, and what each is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.limits import text_config
from kvboost.weights.replace import is_transposed, linear_shape, linears

WORD_COLUMNS = 8
"""Outputs in a word of the AWQ format."""


class _Reached(Exception):
    """The last layer was called; what comes after is not needed."""


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(name, decoder layers). Raises `UnsupportedModel` when they cannot be told."""
    count = text_config(model.config).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UnsupportedModel(
        f"{type(model).__name__}: no list of {count} decoder layers was found, so it cannot be quantised."
    )


def check_blocks(model: PreTrainedModel, group: int) -> list[str]:
    """Names of linears that stay dense, because their outputs fill no whole words.

    Raises `ConfigError` when the group does not divide the inputs of some linear, `UnsupportedModel` when there is
    nothing to quantise or a layer keeps its weights in something else than linears.
    """
    prefix, blocks = find_blocks(model)
    found = [(f"{prefix}.{name}", module) for name, module in quantisable(blocks)]
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} has no plain linears in its layers; AWQ files hold nothing else."
        )
    for name, parameter in blocks.named_parameters():
        if parameter.ndim > 2:
            raise UnsupportedModel(
                f"{type(model).__name__} keeps its experts in one tensor ({prefix}.{name}); quantising those is not supported."
            )
    inputs = {linear_shape(module)[1] for _, module in found}
    if any(k % group for k in inputs):
        fitting = [g for g in (128, 64, 32) if not any(k % g for k in inputs)]
        hint = (
            f"Use {' or '.join(map(str, fitting))}." if fitting else "No group size fits this model; use int8 instead."
        )
        raise ConfigError(
            "group_size",
            f"{group} does not divide the {min(k for k in inputs if k % group)} inputs of a linear. {hint}",
        )
    return [name for name, module in found if linear_shape(module)[0] % WORD_COLUMNS]


def quantisable(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in linears(block) if not is_transposed(module)]


class Calls:
    """What every decoder layer is called with besides its hidden states, and the hidden states of the first."""

    def __init__(self, model: PreTrainedModel, blocks: nn.ModuleList, ids: Tensor) -> None:
        self.kwargs: list[dict[str, Any]] = [{} for _ in blocks]
        self.args: list[tuple[Any, ...]] = [() for _ in blocks]
        self.hidden: list[Tensor] = []
        """fp32 `[1, tokens, hidden]` for each sequence."""
        self._observe(model, blocks, ids)

    @torch.no_grad()
    def _observe(self, model: PreTrainedModel, blocks: nn.ModuleList, ids: Tensor) -> None:
        last = len(blocks) - 1

        def note(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if index == 0:
                self.hidden.append(hidden.float().cpu())
            self.args[index], self.kwargs[index] = args[1:], kwargs
            # All sequences have one length: what the first showed of later layers holds for the others.
            if index == last or len(self.hidden) > 1:
                raise _Reached

        def hook(index: int) -> Any:
            return lambda module, args, kwargs: note(index, args, kwargs)

        hooks = [block.register_forward_pre_hook(hook(i), with_kwargs=True) for i, block in enumerate(blocks)]
        try:
            for sequence in ids:
                try:
                    model(input_ids=sequence[None].to(model.device), use_cache=False)
                except _Reached:
                    pass
        finally:
            for handle in hooks:
                handle.remove()

    def run(self, block: nn.Module, index: int, hidden: Tensor, device: torch.device) -> Tensor:
        """The output of layer `index` in fp32, `[1, tokens, hidden]`."""
        args, kwargs = _as_fp32((self.args[index], self.kwargs[index]), device)
        out = block(hidden.to(device), *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


def _as_fp32(value: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and dicts on the device, those of floats in fp32."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32) if value.is_floating_point() else value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_as_fp32(x, device) for x in value)
    return {k: _as_fp32(x, device) for k, x in value.items()} if isinstance(value, dict) else value
