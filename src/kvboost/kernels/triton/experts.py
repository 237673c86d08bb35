"""Mixtures of experts: each token through the experts that a router chose for it, `sum of weight * down(act(gate) * up)`.

Nothing depends on the router's choice but what the kernels read, so a CUDA graph serves every choice. Two forms:

- few pairs of a token and an expert: every pair reads its expert's rows by itself, multiplied outside of matrix units, and
  one program of the second product adds up all experts of a token: two launches;
- more: pairs are sorted by expert into tiles, and each tile's products read the expert's weight once, in matrix units; a
  last launch adds up each token's pairs. Tiles are as many as any choice could need; what is not needed ends at once.

Rounded as Transformers' modules round; the sum over a token's experts is in float32, in an order that never changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvboost.kernels.triton.early import early
from kvboost.kernels.triton.elementwise import ACTIVATIONS
from kvboost.kernels.triton.experts_kernels import (
    combine_kernel,
    pair_inner_kernel,
    pair_outer_kernel,
    sort_kernel,
    tile_kernel,
)

FEW_PAIRS = 32
"""Up to this many pairs each reads weights by itself: few of them meet in one expert."""

CHOICES_TOGETHER = 32
"""Weight rows of one program of the few pairs' second product, over all experts of a token."""

SORT_BLOCK = 4096
"""Pairs that a program of the sort looks at together."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Weight rows and columns of one step of a program, warps, pipeline stages. Columns are of 16 bits: in float32 a tile
    has half as many, since shared memory is what bounds it."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertsTile:
    """Pairs of a tile, 0 where each pair is computed by itself; then the tiles of gate and up, and of down."""

    pairs: int
    inner: ProductTile
    outer: ProductTile


def routed_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    residual: Tensor | None = None, *, tile: ExpertsTile | None = None,
) -> Tensor:  # fmt: skip
    """`[T, H]`: the experts `index [T, K]` of `x [T, H]`, times `weights [T, K]`, added up and rounded once.

    gate_up `[E, 2I, H]`, gate first, and down `[E, H, I]`, contiguous and like x; index holds integers below E; weights of
    any floating dtype; activation: one of `ACTIVATIONS`. residual, like x, is added to the rounded sum. tile overrides
    `chosen_tile`. Raises ValueError where shapes, dtypes or strides do not fit. An index beyond the experts is not noticed.
    """
    _check(x, index, weights, gate_up, down, activation, residual)
    if tile is None:
        tile = chosen_tile(x.shape[0], index.shape[1], gate_up.shape[0])
    if not x.shape[0]:
        return torch.empty_like(x)
    index, weights = index.contiguous(), weights.contiguous()
    form = _one_by_one if tile.pairs == 0 else _in_tiles
    return form(x, index, weights, gate_up, down, activation, residual, tile)


def chosen_tile(tokens: int, top: int, experts: int) -> ExpertsTile:
    """By how many pairs an expert has on average; more than that fit in a tile, since choices are not even.

    Measured on an H200 for 128 experts of 2048 x 768, and held to the 99 KiB of shared memory that a program has on any GPU."""
    pairs = tokens * top
    if pairs <= FEW_PAIRS:
        rows = max(1, CHOICES_TOGETHER // triton.next_power_of_2(top))
        return ExpertsTile(0, ProductTile(4, 512, 4, 3), ProductTile(rows, 256, 4, 3))
    if pairs <= 8 * experts:
        return ExpertsTile(16, ProductTile(64, 64, 4, 5), ProductTile(64, 128, 4, 4))
    if pairs <= 24 * experts:
        return ExpertsTile(32, ProductTile(64, 64, 4, 5), ProductTile(64, 128, 4, 4))
    if pairs <= 64 * experts:
        return ExpertsTile(64, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4))
    return ExpertsTile(128, ProductTile(64, 64, 4, 3), ProductTile(128, 64, 4, 3))


def tokens_of_each_tile(top: int, experts: int) -> tuple[int, ...]:
    """A number of tokens for every tile that `chosen_tile` may choose, the fewest of powers of two."""
    return tuple({chosen_tile(1 << i, top, experts): 1 << i for i in reversed(range(17))}.values())


def _one_by_one(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, residual: Tensor | None,
    tile: ExpertsTile,
) -> Tensor:  # fmt: skip
    (tokens, hidden), top, size = x.shape, index.shape[1], down.shape[2]
    inner, out = x.new_empty(tokens * top, size), x.new_empty(tokens, hidden)
    first, second, options = tile.inner, tile.outer, early(x.device)
    pair_inner_kernel[(tokens * top, triton.cdiv(size, first.n))](
        x, index, gate_up, inner, size, hidden, x.stride(0),
        TOP=top, ACTIVATION=activation, BLOCK_N=first.n, BLOCK_K=first.k, STAGES=first.stages,
        EVEN=hidden % first.k == 0, num_warps=first.warps, **options,
    )  # fmt: skip
    together = triton.next_power_of_2(top)
    pair_outer_kernel[(tokens, triton.cdiv(hidden, second.n))](
        inner, index, weights, down, residual, out, hidden, size,
        TOP=top, BLOCK_TOP=together, BLOCK_N=second.n, BLOCK_K=second.k, STAGES=second.stages,
        EVEN=size % second.k == 0 and together == top, num_warps=second.warps, **options,
    )  # fmt: skip
    return out


def _in_tiles(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, residual: Tensor | None,
    tile: ExpertsTile,
) -> Tensor:  # fmt: skip
    (tokens, hidden), (experts, _, size), pairs = x.shape, down.shape, index.numel()
    slots = min(pairs, experts) + pairs // tile.pairs
    order = index.new_empty(pairs, dtype=torch.int32)
    tiles = index.new_empty(slots, 3, dtype=torch.int32)
    inner, parts, out = (x.new_empty(*shape) for shape in ((pairs, size), (pairs, hidden), (tokens, hidden)))
    options = early(x.device)
    block = max(32, min(triton.next_power_of_2(pairs), SORT_BLOCK))
    sort_kernel[(experts,)](
        index,
        order,
        tiles,
        pairs,
        TILE_ROWS=tile.pairs,
        BLOCK=block,
        num_warps=max(1, min(block // 256, 16)),
        **options,
    )
    for source, weight, target, by, is_gated in (
        (x, gate_up, inner, tile.inner, True),
        (inner, down, parts, tile.outer, False),
    ):
        n, k, columns = target.shape[1], source.shape[1], by.k * 2 // x.element_size()
        warps = 8 if x.dtype == torch.float32 and tile.pairs > 64 else by.warps  # without matrix units 4 would spill
        tile_kernel[(triton.cdiv(n, by.n), slots)](
            source, weight, tiles, order, target, n, k, source.stride(0),
            TOP=index.shape[1], GATED=is_gated, ACTIVATION=activation, TILE_ROWS=tile.pairs, BLOCK_N=by.n, BLOCK_K=columns,
            EVEN=k % columns == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=by.stages, **options,
        )  # fmt: skip
    width = min(triton.next_power_of_2(hidden), 512)
    combine_kernel[(tokens, triton.cdiv(hidden, width))](
        parts, weights, residual, out, hidden,
        TOP=index.shape[1], BLOCK_TOP=triton.next_power_of_2(index.shape[1]), BLOCK_N=width, num_warps=4, **options,
    )  # fmt: skip
    return out


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, residual: Tensor | None
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}.")
    if x.dim() != 2 or x.stride(1) != 1 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(x):
        raise ValueError(
            f"x {tuple(x.shape)}, index {tuple(index.shape)} and weights {tuple(weights.shape)} must be [T, H] with "
            "contiguous rows, [T, K] and [T, K]."
        )
    if index.is_floating_point() or not weights.is_floating_point() or index.shape[1] == 0:
        raise ValueError(
            f"index in {index.dtype} must hold integers and weights in {weights.dtype} must not, one or more."
        )
    experts, hidden, size = down.shape
    if gate_up.shape != (experts, 2 * size, hidden) or hidden != x.shape[1]:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be [E, 2I, {x.shape[1]}] and [E, {x.shape[1]}, I]."
        )
    if not x.dtype == gate_up.dtype == down.dtype or not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError(f"gate_up in {gate_up.dtype} and down in {down.dtype} must be contiguous and in {x.dtype}.")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} in {residual.dtype} must be contiguous and like x.")
