# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear layers for 1 to 64 rows, where reading the weight is all there is to do.

The inner dimension is split among programs until they fill the GPU; their partial sums are added in a fixed order by a
second launch, so results do not change from run to run. A product begins while the kernel before it ends: weights are not what
that computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, fetch_ahead, wait_for_kernel_before
from kvboost.kernels.triton.support import starts_early

MAX_ROWS = 64

PROGRAMS_PER_PROCESSOR = 2
"""Programs that read at the same time on a multiprocessor: rows are split until there are as many."""

LARGE_BYTES = 4 << 20
"""No smaller weights were measured."""

NARROW, WIDE = 4224, 16_384
"""From 17 to 32 rows cuBLAS is up to 8% faster for weights between these, unless they have long rows."""


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Weight rows and columns of one step of a program, splits of the inner dimension, warps, pipeline stages."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    total: Tensor | None = None,
    tile: SkinnyTile | None = None,
) -> Tensor:
    """`x [rows, k] @ weight [n, k].T + bias [n]`, summed in float32 and rounded once. At most 64 rows.

    total: contiguous `[rows, n]`; the product is added to it before the rounding, in place, and it is returned. tile overrides
    `chosen_tile`. Raises ValueError for more rows, or shapes and dtypes that do not fit.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"skinny_linear takes 1 to {MAX_ROWS} rows, not {rows}. Use torch's linear.")
    if weight.shape[1] != k or not x.dtype == weight.dtype or weight.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} in {x.dtype} does not fit weight {tuple(weight.shape)} in {weight.dtype}, or their rows "
            "are not contiguous."
        )
    for name, added, shape in (("bias", bias, (n,)), ("total", total, (rows, n))):
        if added is not None and (added.shape != shape or added.dtype != x.dtype or not added.is_contiguous()):
            raise ValueError(f"{name} {tuple(added.shape)} in {added.dtype} must be contiguous {shape} in {x.dtype}.")
    tile = tile or chosen_tile(n, k, x.device)
    out = x.new_empty(rows, n) if total is None else total
    share = triton.cdiv(triton.cdiv(k, tile.splits), tile.k) * tile.k
    splits = triton.cdiv(k, share)
    partial = out if splits == 1 else x.new_empty(splits, rows, n, dtype=torch.float32)
    _skinny_kernel[(triton.cdiv(n, tile.n), splits)](
        x, weight, bias, total, partial, rows, n, k, share, x.stride(0), weight.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n, BLOCK_K=tile.k, SPLIT=splits > 1,
        EVEN_K=k % tile.k == 0 and share * splits == k, EVEN_N=n % tile.n == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **early(x.device),
    )  # fmt: skip
    if splits > 1:
        add_splits(partial, bias, total, out)
    return out


def add_splits(partial: Tensor, bias: Tensor | None, total: Tensor | None, out: Tensor) -> None:
    """`out [rows, n]`: the sum of `partial [splits, rows, n]` (float32) in their order, `bias [n]` and `total`, rounded once."""
    splits, rows, n = partial.shape
    block = 256
    _sum_kernel[(triton.cdiv(n, block), rows)](
        partial, bias, total, out, rows, n, splits, BLOCK=block, num_warps=2, **early(out.device)
    )  # fmt: skip


def faster_than_cublas(x: Tensor, weight: Tensor) -> bool:
    """Whether it was, for weights and rows like these, on the one GPU it was measured on (H200; docs/results/gpu-skinny.md)."""
    (rows, k), n = x.shape, weight.shape[0]
    if x.dtype == torch.float32 or k % 128 or weight.nbytes < LARGE_BYTES or not starts_early(x.device):
        return False
    return rows <= 16 or (rows <= 32 and (n <= NARROW or n >= WIDE or k >= 2 * n))


def chosen_tile(n: int, k: int, device: torch.device) -> SkinnyTile:
    """Within 2% of the best of 8 tiles, each with several splits, for every weight of Qwen2.5-7B and 1 to 64 rows on an H200."""
    block_n, block_k = 64, 128
    wanted = PROGRAMS_PER_PROCESSOR * processors(device)
    splits = max(1, min(wanted // triton.cdiv(n, block_n), triton.cdiv(k, 4 * block_k), 16))
    return SkinnyTile(block_n, block_k, splits, 4, 4)


@lru_cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x, weight, bias, total, out, rows, n, k, share, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(blocks of weight rows, splits)`. The weight is the tall operand of the product, x the narrow one."""
    row_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    column = split * share + tl.arange(0, BLOCK_K)
    end = tl.minimum(split * share + share, k)
    row_x = tl.arange(0, BLOCK_M)
    weight_at = weight + row_n.to(tl.int64)[:, None] * weight_stride + column[None, :]
    x_at = x + row_x[None, :] * x_stride + column[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if EARLY:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        line = split * share + tl.arange(0, 2 * BLOCK_K // LINE) * LINE
        lines = weight + row_n.to(tl.int64)[:, None] * weight_stride + line[None, :]
        fetch_ahead(lines, (row_n < n)[:, None] & (line < end)[None, :])
    wait_for_kernel_before(EARLY)
    for start in range(split * share, end, BLOCK_K):
        inside = start + tl.arange(0, BLOCK_K) < end
        if EVEN_K and EVEN_N:
            w = tl.load(weight_at, cache_modifier=".cg", eviction_policy="evict_first")
        else:
            w = tl.load(weight_at, mask=(row_n < n)[:, None] & inside[None, :], other=0.0)
        narrow = tl.load(x_at, mask=(row_x < rows)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, narrow, acc, input_precision=PRECISION)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    mask = (row_n < n)[:, None] & (row_x < rows)[None, :]
    if SPLIT:
        target = out + (split * rows + row_x[None, :]).to(tl.int64) * n + row_n[:, None]
        tl.store(target, acc, mask=mask)
    else:
        if bias is not None:
            acc += tl.load(bias + row_n, mask=row_n < n, other=0.0).to(tl.float32)[:, None]
        place = row_x[None, :].to(tl.int64) * n + row_n[:, None]
        if total is not None:
            acc += tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum_kernel(partial, bias, total, out, rows, n, splits, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid `(blocks of columns, rows)`: the splits in their order, the bias, what is there already, one rounding."""
    wait_for_kernel_before(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = column < n
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        acc += tl.load(partial + (split * rows + row) * n + column, mask=mask, other=0.0)
    if bias is not None:
        acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if total is not None:
        acc += tl.load(total + row * n + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, acc.to(out.dtype.element_ty), mask=mask)
