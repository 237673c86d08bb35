"""The two searches of AWQ (Lin et al., 2023), on one block in fp32.

Scales: a linear's input columns are multiplied by `s = x^r / w^(1-r)`, x the mean magnitude of each input and w that of
its weights relative to their group; of 20 exponents r, and of no scaling, the one is kept whose rounded weights change the
watched module's output least. Clipping: each group's range is cut to between 50% and 100%, whatever changes the group's
part of the output least; a few large weights then no longer spread the levels of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvboost.weights.quantize.folds import Fold, columns_of
from kvboost.weights.rounding import zero_codes

EXPONENTS = tuple(i / 20 for i in range(20))

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of a group's range that are tried, for its low and its high end by turns."""

CLIP_ROWS = 4096
"""Inputs that the clipping search looks at."""

ROWS_TOGETHER = 256
"""Rows of a weight that the clipping search works on at a time."""


def rounded_weight(weight: Tensor, group: int) -> Tensor:
    """fp32 `[n, k]` rounded to 4 bits per group and back."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    return unround(*zero_codes("a weight", grouped, *grouped.aminmax(dim=-1)), group)


def unround(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """fp32 `[n, k]` of what `zero_codes` gives."""
    steps = codes.view(codes.shape[0], -1, group).float() - zeros.unsqueeze(-1).float()
    return (steps * scales.unsqueeze(-1).float()).flatten(1)


@torch.no_grad()
def best_scales(fold: Fold, inputs: Tensor, output: Callable[[], Tensor], shares: Tensor, group: int) -> Tensor | None:
    """fp32 `[k]`, or None when no scaling is best.

    inputs: `[tokens, k]` of the linears. output: computes the watched module, `[tokens, ...]`. shares: `[tokens]`, see
    `token_shares`. The linears are put back as they were.
    """
    activation = (inputs.abs() * shares[:, None]).mean(0)
    weights = [columns_of(linear) for linear in fold.linears]
    own = [weight.clone() for weight in weights]
    magnitude = _relative_magnitude(torch.cat(own), group)
    wanted = output()
    best, least = None, float("inf")
    try:
        for scales in (None, *(_scales(activation, magnitude, r) for r in EXPONENTS)):
            for weight, before in zip(weights, own, strict=True):
                scaled = before if scales is None else before * scales
                rounded = rounded_weight(scaled, group)
                weight.copy_(rounded if scales is None else rounded / scales)
            loss = float((output() - wanted).mul_(shares[:, None]).square_().mean())
            if loss < least:
                best, least = scales, loss
    finally:
        for weight, before in zip(weights, own, strict=True):
            weight.copy_(before)
    return best


def token_shares(hidden: Tensor) -> Tensor:
    """`[tokens]`: how much an error at each token counts, from fp32 hidden states `[tokens, hidden]` after the layer.

    The next norm divides every token by its magnitude. A few tokens (the first of a text above all) have one that is
    hundreds of times the others'; unweighted, the searches would serve them alone.
    """
    sizes = hidden.square().mean(-1).sqrt()
    shares = 1 / sizes.clamp_min(1e-6)
    return shares / shares.mean()


def _relative_magnitude(weight: Tensor, group: int) -> Tensor:
    """`[k]`: mean over rows of each weight's magnitude relative to the largest of its group."""
    grouped = weight.abs().view(weight.shape[0], -1, group)
    return (grouped / grouped.amax(dim=-1, keepdim=True).clamp_min(1e-8)).mean(0).flatten()


def _scales(activation: Tensor, magnitude: Tensor, r: float) -> Tensor:
    scales = (activation.pow(r) / (magnitude.pow(1 - r) + 1e-4)).clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


@torch.no_grad()
def best_ranges(weight: Tensor, inputs: Tensor, shares: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(low, high), each `[n, groups]`: the ranges that codes of fp32 `weight[n, k]` should cover.

    inputs: `[tokens, k]`. shares: `[tokens]`, see `token_shares`.
    """
    n, k = weight.shape
    step = max(1, inputs.shape[0] // CLIP_ROWS)
    x = (inputs * shares[:, None])[::step].reshape(-1, k // group, group).transpose(0, 1)
    gram = x.transpose(1, 2) @ x  # [groups, group, group]: the error of a group is quadratic in its weights
    pieces = [
        _clip(weight[i : i + ROWS_TOGETHER].view(-1, k // group, group), gram) for i in range(0, n, ROWS_TOGETHER)
    ]
    low, high = zip(*pieces, strict=True)
    return torch.cat(low), torch.cat(high)


def _clip(weight: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """First both ends are cut alike, then each by itself around what was found."""
    low, high = weight.aminmax(dim=-1)
    best = _Ranges(weight, gram, low, high)
    for shrink in SHRINKS:
        best.offer(low * shrink, high * shrink)
    for shrink in SHRINKS:
        best.offer(low * shrink, best.high)
    for shrink in SHRINKS:
        best.offer(best.low, high * shrink)
    return best.low, best.high


class _Ranges:
    """The best ranges so far of some rows, `[rows, groups]`."""

    def __init__(self, weight: Tensor, gram: Tensor, low: Tensor, high: Tensor) -> None:
        self._weight, self._gram = weight, gram
        self.low, self.high = low, high
        self._least = torch.full_like(low, float("inf"))

    def offer(self, low: Tensor, high: Tensor) -> None:
        codes, scales, zeros = zero_codes("a weight", self._weight, low, high)
        group = self._weight.shape[-1]
        error = (unround(codes, scales, zeros, group).view_as(self._weight) - self._weight).transpose(0, 1)
        loss = ((error @ self._gram) * error).sum(-1).T
        better = loss < self._least
        self._least = torch.where(better, loss, self._least)
        self.low, self.high = torch.where(better, low, self.low), torch.where(better, high, self.high)


def inputs_of(block: nn.Module, modules: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, Tensor]:
    """What each module is called on while `run` runs, `[tokens, k]`, concatenated over its calls."""
    found: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[module].append(args[0].reshape(-1, args[0].shape[-1]))

    hooks = [module.register_forward_pre_hook(note) for module in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {module: torch.cat(pieces) for module, pieces in found.items() if pieces}
