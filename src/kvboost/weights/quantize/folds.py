"""Which scales can be moved between the linears of a block and what feeds them, found on numbers.

Multiplying the input columns of a linear by s and dividing what produces that input by s leaves a block's output as it
was, when nothing else reads it. Two kinds of feeders have such outputs: norms (`y = normalised * (weight + offset)
[+ bias]`), and linears whose output reaches the next linear through products only (v to o when every query head has its
own value head, up to down). Every candidate is tried with random scales; only those that keep the block's output count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvboost.weights.replace import is_transposed, linear_shape, linears

FEEDERS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"))
"""Names of linears of one parent where the first may feed the second."""

FUSED_FEEDERS = (("gate_up_proj", "down_proj"), ("qkv_proj", "o_proj"))
"""As above; the first holds several matrices, and its last rows are the ones in question (Phi-3)."""

TOLERANCE = 1e-3
"""Greatest ‖folded - own‖ / ‖own‖ of a block's output in fp32. A fold that changes the function is off by far more."""

Run = Callable[[], Tensor]
"""Computes the block on the trial's input and gives its output."""


@dataclass(frozen=True)
class Feeder:
    """What produces the input of some linears, and how its output is divided.

    rows: those of its output that are meant, counted from the end; None for all. offset: what a norm adds to its weight.
    """

    module: nn.Module
    rows: int | None = None
    offset: float = 0.0

    def divide(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide by fp32 `scales` and return the scales that were really applied.

        A norm's new weight is rounded to `dtype`, in which it is stored; the scales follow, so that nothing is lost. A
        linear's weight is quantised later and needs no rounding here.
        """
        weight = self.module.get_parameter("weight")
        at = slice(None) if self.rows is None else slice(-self.rows, None)
        if weight.ndim == 2:
            columns = is_transposed(self.module)
            (weight[:, at] if columns else weight[at]).div_(scales if columns else scales[:, None])
        else:
            wanted = (weight + self.offset) / scales
            stored = (wanted - self.offset).to(dtype).to(weight.dtype)
            applied = (weight + self.offset) / (stored + self.offset)
            scales = torch.where(torch.isfinite(applied) & (applied > 0), applied, scales)
            weight.copy_(stored)
        bias = self.module._parameters.get("bias")
        if bias is not None:
            bias[at].div_(scales)
        return scales


@dataclass(frozen=True)
class Fold:
    """Linears that share one input, by name inside the block, what feeds them, and the module whose output is watched."""

    feeder: Feeder
    names: tuple[str, ...]
    linears: tuple[nn.Module, ...]
    watched: nn.Module

    def apply(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Move `scales` (fp32 `[k]`) into the linears; returns the scales that were really applied."""
        scales = self.feeder.divide(scales, dtype)
        for linear in self.linears:
            columns_of(linear).mul_(scales)
        return scales


def columns_of(linear: nn.Module) -> Tensor:
    """The weight as `[outputs, inputs]`; writing into it writes into the linear."""
    weight = linear.get_parameter("weight")
    return weight.T if is_transposed(linear) else weight


@torch.no_grad()
def find_folds(block: nn.Module, run: Run, dtype: torch.dtype) -> list[Fold]:
    """All folds of a block, in the order in which they are to be searched. dtype: norms are stored in it."""
    own = run()
    found = []
    for fold in [*_after_norms(block, run), *_after_linears(block)]:
        if _holds(block, fold, run, own, dtype):
            found.append(fold)
    return found


def _after_norms(block: nn.Module, run: Run) -> list[Fold]:
    """Norms whose very output is the input of some linears."""
    outputs: dict[int, nn.Module] = {}
    readers: dict[nn.Module, dict[str, None]] = {}
    kept: list[Tensor] = []  # alive, so that no other tensor gets the identity of one

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(output)] = module
            kept.append(output)

    names = {module: name for name, module in linears(block)}

    def note_input(module: nn.Module, args: Any) -> None:
        norm = outputs.get(id(args[0])) if args else None
        if norm is not None:
            readers.setdefault(norm, {})[names[module]] = None

    norms = [
        m for m in block.modules() if m._parameters.get("weight") is not None and m.get_parameter("weight").ndim == 1
    ]
    hooks = [m.register_forward_hook(note_output) for m in norms]
    hooks += [m.register_forward_pre_hook(note_input) for m in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    folds = []
    for norm, read in readers.items():
        folds += [_fold(block, Feeder(norm, offset=offset), list(read)) for offset in (0.0, 1.0)]
    return folds


def _after_linears(block: nn.Module) -> list[Fold]:
    known = dict(linears(block))
    folds = []
    for first, second in (*FEEDERS, *FUSED_FEEDERS):
        for name, module in known.items():
            parent, _, leaf = name.rpartition(".")
            after = f"{parent}.{second}" if parent else second
            if leaf != first or after not in known:
                continue
            width, k = linear_shape(module)[0], linear_shape(known[after])[1]
            fused = (first, second) in FUSED_FEEDERS
            if width == k or (fused and width > k):
                folds.append(_fold(block, Feeder(module, k if fused else None), [after]))
    return folds


def _fold(block: nn.Module, feeder: Feeder, names: Sequence[str]) -> Fold:
    """Watched is the smallest module that holds all of the linears; a lone linear is watched itself."""
    parts = [name.split(".") for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    watched = block.get_submodule(".".join(shared))
    return Fold(feeder, tuple(names), tuple(block.get_submodule(name) for name in names), watched)


def _holds(block: nn.Module, fold: Fold, run: Run, own: Tensor, dtype: torch.dtype) -> bool:
    """Whether the block's output stays as it is under random scales. The weights are put back."""
    touched = [fold.feeder.module, *fold.linears]
    before = [{key: p.clone() for key, p in module._parameters.items() if p is not None} for module in touched]
    k = linear_shape(fold.linears[0])[1]
    device = fold.linears[0].get_parameter("weight").device
    scales = torch.linspace(0.5, 2.0, k, device=device)[torch.randperm(k, generator=_generator()).to(device)]
    try:
        fold.apply(scales, torch.float32)
        difference = (run() - own).norm() / own.norm().clamp_min(1e-12)
    finally:
        for module, saved in zip(touched, before, strict=True):
            for key, value in saved.items():
                module.get_parameter(key).copy_(value)
    return bool(difference < TOLERANCE)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
