# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear layers of packed weights for few rows: codes are unpacked in registers, on their way to the matrix units.

As in `skinny`, weight rows are the tall operand, x the narrow one, and the inner dimension is split among programs whose
partial sums are added in a fixed order. Two forms:

- groups of 64 weights and more with one scale each: q - z meets x, the scale multiplies the sum of a step. Nothing is
  rounded before the sum;
- others: weights are `a * (q - z) + b` in fp32, rounded to x's dtype, as when they are unpacked to memory.

Memory: a step of a program reads 64 contiguous bytes (128 weights of 4 bits, or two sectors of 32 bytes) of each of its
rows, 16 bytes a thread. Rows begin at multiples of 16 bytes, so half of them touch a third sector, which the next step
finds in the L2 cache: DRAM serves each byte once. With 64 rows, 3 steps on their way and 8 programs, a multiprocessor
has 96 KiB in flight; 4.3 TB/s at a latency of 1 us need 32 KiB of each. The scales of a row are read 2 bytes a step, but
16 steps share a sector, which stays in L1. So row-wise rows do not stand in the way, and no second layout is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.packed_codes import (
    ZEROS,
    as_scales,
    byte_number,
    constant_zero,
    decoded_bytes,
    decoded_halves,
    layout,
    nibbles,
    number,
    offset,
    stored_zero,
)
from kvboost.kernels.triton.skinny import add_splits, processors
from kvboost.weights.packing import RUN, Packing, Scheme

ROWS_TOGETHER = 64
"""Most rows of x that a program multiplies; more are taken in turns, whose weights the L2 cache may still hold."""

WIDE_GROUP = 64
"""From this many weights on a group's scale is applied to its sums, where the scheme has only that."""

TORCH_TO_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class PackedTile:
    """Weight rows and weights of a row in one step of a program, splits of the inner dimension, warps, stages."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int


MEASURED: dict[tuple[int, int, int, int], PackedTile] = {}
"""Best tiles by (bits, n, k, padded rows), from `scripts/bench_kernels.py packed --tune`. Other shapes take
`chosen_tile`'s rule."""

RULE = {8: (64, 128, 2, 3, 8), 16: (64, 128, 2, 3, 6), 32: (128, 128, 4, 3, 4), 64: (128, 64, 4, 4, 3)}
"""By padded rows: a tile's weight rows, weights of a row, warps, stages; and the programs whose registers fit in a
multiprocessor. The tiles are those that were fastest at most shapes of Qwen2.5 7B and 32B on an H200."""

RULE_WITHOUT_UNITS = (32, 64, 2, 2, 4)
"""The same without matrix units, where larger tiles spill."""

MOST_SPLITS = 16
LEAST_STEPS = 4
"""Of a split: before, its loads are not even on their way."""
LAUNCH_BYTES = 6 << 20
"""What a GPU of the largest kind reads while the launch that adds up splits starts and ends: 1.5 us."""


def packed_few_rows(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None, *, tile: PackedTile | None = None
) -> Tensor:
    """`x [rows, k] @ W.T + bias [n]`, summed in float32 and rounded once. For few rows.

    weight: uint8 `[n, packing.row_bytes]`. tile overrides the table. Raises ValueError for no rows, and shapes and dtypes
    that do not fit.
    """
    check_product(x, weight, packing, bias)
    rows, k = x.shape
    if not rows:
        raise ValueError("packed_few_rows takes one row or more, not none.")
    n = weight.shape[0]
    units = matrix_units(x.dtype, x.device)
    together = padded_rows(rows, units)
    tile = tile or chosen_tile(packing, n, rows, x.device, units)
    block_k = step_weights(packing, tile.k)
    steps = triton.cdiv(k, block_k)
    share = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, share)
    out = x.new_empty(rows, n)
    partial = out if splits == 1 else x.new_empty(splits, rows, n, dtype=torch.float32)
    _packed_kernel[(triton.cdiv(n, tile.n), splits, triton.cdiv(rows, together))](
        x, weight, bias, partial, rows, n, k, steps, share, x.stride(0), weight.stride(0), **layout(packing, x.dtype),
        BLOCK_N=tile.n, BLOCK_K=block_k, ROWS=together, SPLIT=splits > 1, BY_GROUP=by_group(packing),
        EVEN=k % block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        add_splits(partial, bias, None, out)
    return out


def check_product(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None) -> None:
    """Raises ValueError where the operands of a product do not fit each other."""
    if x.dim() != 2 or x.shape[1] != packing.k or x.dtype not in TORCH_TO_TRITON or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} in {x.dtype} must be [rows, {packing.k}] in bf16, fp16 or fp32 with contiguous rows."
        )
    check_rows(weight, packing)
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} in {bias.dtype} must be [{weight.shape[0]}] in {x.dtype}.")


def check_rows(weight: Tensor, packing: Packing) -> None:
    """Raises ValueError for a weight that is not rows of `packing`, aligned to 16 bytes."""
    wrong = weight.dtype != torch.uint8 or weight.dim() != 2 or weight.shape[1] != packing.row_bytes
    if wrong or weight.stride(1) != 1 or weight.stride(0) % 16 or weight.data_ptr() % 16:
        raise ValueError(
            f"weight {tuple(weight.shape)} in {weight.dtype} must be uint8 [n, {packing.row_bytes}], rows contiguous and "
            "at multiples of 16 bytes."
        )


@lru_cache
def matrix_units(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton multiplies in matrix units: not in fp32, and not before compute capability 8.0."""
    if dtype is torch.float32:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def padded_rows(rows: int, units: bool) -> int:
    """Rows of x in a program: 8, 16, 32 or 64. Without matrix units 8 or 16, as more would spill."""
    return max(8, min(triton.next_power_of_2(rows), ROWS_TOGETHER if units else 16))


def by_group(packing: Packing) -> bool:
    """Whether scales are applied to sums."""
    single = packing.scheme in (Scheme.SYMMETRIC, Scheme.ZEROS, Scheme.FLOAT8) and packing.bits in (4, 8)
    return single and packing.group % WIDE_GROUP == 0


def step_weights(packing: Packing, wanted: int) -> int:
    """Weights of a row in one step: a power of two, no more than `wanted`, that fits groups where scales wait for sums."""
    step = max(RUN, wanted)
    while by_group(packing) and packing.group % step:
        step //= 2
    return step


def chosen_tile(packing: Packing, n: int, rows: int, device: torch.device, units: bool = True) -> PackedTile:
    """The measured tile of a shape, or one by rule. units: `matrix_units`."""
    padded = padded_rows(rows, units)
    found = MEASURED.get((packing.bits, n, packing.k, padded))
    if found is not None:
        return found
    block_n, block_k, warps, stages, programs = RULE[padded] if units else RULE_WITHOUT_UNITS
    steps = triton.cdiv(packing.k, step_weights(packing, block_k))
    blocks = triton.cdiv(n, block_n) * triton.cdiv(rows, padded)
    split_bytes = 8 * rows / packing.row_bytes  # partial sums, written and read, for one byte of weights
    launch_bytes = LAUNCH_BYTES / (n * packing.row_bytes)
    splits = chosen_splits(blocks / processors(device), steps, programs, split_bytes, launch_bytes)
    return PackedTile(block_n, block_k, splits, warps, stages)


def chosen_splits(blocks: float, steps: int, programs: int, split_bytes: float, launch_bytes: float) -> int:
    """Splits of the inner dimension that waste least.

    blocks: programs that each multiprocessor gets without splitting. steps: of the inner dimension. programs: so many run
    at a time on a multiprocessor; half as many read nearly as fast, so that fewer waste time at the end. split_bytes,
    launch_bytes: what every split adds, and splitting at all, for one byte that is read without.
    """

    def waste(splits: int) -> float:
        mine = blocks * splits
        rounds = mine // programs * programs
        last = max(math.ceil(mine - rounds), programs / 2) if mine > rounds else 0
        return (rounds + last) / mine * (1 + (splits * split_bytes + launch_bytes if splits > 1 else 0))

    shares = {math.ceil(steps / splits) for splits in range(1, max(1, min(MOST_SPLITS, steps // LEAST_STEPS)) + 1)}
    return min(sorted(math.ceil(steps / share) for share in shares), key=waste)


@triton.jit(do_not_specialize=["rows", "steps", "share"])
def _packed_kernel(
    x, weight, bias, out, rows, n, k, steps, share, x_stride, row_bytes, high_at, scales_at, beside_at,
    SCHEME: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE_SCALES: tl.constexpr, MAGIC: tl.constexpr,
    PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    BY_GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid `(blocks of weight rows, splits, blocks of x's rows)`; each split takes `share` of the steps along k.

    Rows of the last block beyond n are the last row again, not stored. Offsets are multiples of a constant, so that the
    compiler knows their alignment and reads 16 bytes at a time.
    """
    row_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row_x = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    base = weight + tl.minimum(row_n, n - 1).to(tl.int64) * row_bytes
    x_rows = x + row_x.to(tl.int64)[None, :] * x_stride
    x_inside = (row_x < rows)[None, :]
    like: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for step in range(split * share, tl.minimum(split * share + share, steps)):
        start = step * BLOCK_K
        if BITS == 8:
            column = start + tl.arange(0, BLOCK_K)
            inside = x_inside if EVEN else x_inside & (column < k)[:, None]
            narrow = tl.load(x_rows + column[:, None], mask=inside, other=0.0)
            if BY_GROUP:
                w = byte_number(tl.load(base[:, None] + column[None, :]), like, SCHEME, MAGIC, PTX)
                if SCHEME == ZEROS:
                    w -= stored_zero(base, start // GROUP, None, beside_at, BITS, True).to(like)[:, None]
                part = tl.dot(w, narrow, input_precision=PRECISION)
            else:
                w = decoded_bytes(
                    base[:, None], step * (BLOCK_K // 32), k // 32, scales_at, beside_at,
                    BLOCK_K // 32, SCHEME, GROUP, WIDE_SCALES, EVEN,
                )  # fmt: skip
                acc = tl.dot(w.to(like), narrow, acc, input_precision=PRECISION)
        else:
            byte = tl.arange(0, BLOCK_K // 2)
            column = start + byte // 16 * 32 + byte % 16
            inside = x_inside if EVEN else x_inside & (column < k)[:, None]
            narrow_low = tl.load(x_rows + column[:, None], mask=inside, other=0.0)
            narrow_high = tl.load(x_rows + column[:, None] + 16, mask=inside, other=0.0)
            if BY_GROUP:
                low, high = nibbles(tl.load(base[:, None] + (step * (BLOCK_K // 2) + byte)[None, :]), MAGIC, PTX)
                if SCHEME == ZEROS:
                    zero = stored_zero(base, start // GROUP, None, beside_at, BITS, True)
                else:
                    zero = tl.full([BLOCK_N], constant_zero(SCHEME, BITS), tl.float32)
                zero = (zero + offset(MAGIC)).to(like)[:, None]
                part = tl.dot(number(low, like, MAGIC) - zero, narrow_low, input_precision=PRECISION)
                part = tl.dot(number(high, like, MAGIC) - zero, narrow_high, part, input_precision=PRECISION)
            else:
                low_w, high_w = decoded_halves(
                    base[:, None], step * (BLOCK_K // 32), k // 32, high_at, scales_at, beside_at,
                    BLOCK_K // 32, like, SCHEME, BITS, GROUP, WIDE_SCALES, MAGIC, PTX, EVEN,
                )  # fmt: skip
                acc = tl.dot(low_w.to(like), narrow_low, acc, input_precision=PRECISION)
                acc = tl.dot(high_w.to(like), narrow_high, acc, input_precision=PRECISION)
        if BY_GROUP:
            scale = tl.load(as_scales(base, WIDE_SCALES) + scales_at + start // GROUP).to(tl.float32)
            acc += part * scale[:, None]
    inside = (row_n < n)[:, None] & (row_x < rows)[None, :]
    if SPLIT:
        target = out + (split * rows + row_x[None, :]).to(tl.int64) * n + row_n[:, None]
        tl.store(target, acc, mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + row_n, mask=row_n < n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + row_x[None, :].to(tl.int64) * n + row_n[:, None], acc.to(out.dtype.element_ty), mask=inside)
