"""One decoder layer to 4 bits: scales moved, ranges cut, codes packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvboost.weights.awq import pack_words
from kvboost.weights.quantize.folds import Fold, columns_of, find_folds
from kvboost.weights.quantize.search import best_ranges, best_scales, inputs_of, token_shares
from kvboost.weights.rounding import zero_codes

UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv_proj", "query_key_value")
"""Their outputs meet in a product, q k^T, whose error is not that of either part: cutting their ranges does harm."""


def scale_and_clip(
    block: nn.Module,
    named: Sequence[tuple[str, nn.Module]],
    run: Callable[[slice], list[Tensor]],
    dtype: torch.dtype,
    group: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Move the best scales of an fp32 block into its linears; returns the ranges of those whose weights are better cut.

    run: computes the block on some of the calibration's sequences. dtype: what is not quantised is stored in it.
    """
    everything = partial(run, slice(None))
    shares = token_shares(torch.cat([hidden.flatten(0, -2) for hidden in everything()]))
    for fold in find_folds(block, lambda: run(slice(1))[0], dtype):
        if all(any(linear is module for _, module in named) for linear in fold.linears):
            inputs, output = _observed(block, fold, everything)
            scales = best_scales(fold, inputs, output, shares, group)
            if scales is not None:
                fold.apply(scales, dtype)
    clipped = [(name, module) for name, module in named if name.rpartition(".")[2] not in UNCLIPPED]
    seen = inputs_of(block, [module for _, module in clipped], everything)
    return {
        name: best_ranges(columns_of(module), seen[module], shares, group) for name, module in clipped if module in seen
    }


def _observed(block: nn.Module, fold: Fold, run: Callable[[], list[Tensor]]) -> tuple[Tensor, Callable[[], Tensor]]:
    """The linears' inputs, and a function that computes the watched module again on what it was called with."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = fold.watched.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        inputs = inputs_of(block, fold.linears[:1], run)[fold.linears[0]]
    finally:
        hook.remove()

    def output() -> Tensor:
        results = [fold.watched(*args, **kwargs) for args, kwargs in calls]
        return torch.cat([(r[0] if isinstance(r, tuple) else r).flatten(0, -2) for r in results])

    return inputs, output


def packed_tensors(name: str, weight: Tensor, group: int, ranges: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """`qweight`, `qzeros` and `scales` of fp32 `weight[n, k]`, on the CPU. ranges: what the codes cover; all by default."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    codes, scales, zeros = zero_codes(name, grouped, *(ranges or grouped.aminmax(dim=-1)))
    return {
        f"{name}.qweight": pack_words(codes.T.contiguous()).cpu(),
        f"{name}.qzeros": pack_words(zeros.T.contiguous()).cpu(),
        f"{name}.scales": scales.T.contiguous().cpu(),
    }
