# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear layers for 1 to 16 rows, where reading the weight is all there is to do.

The inner dimension is split among programs until they fill the GPU; their partial sums are added in a fixed order by a
second launch, so results do not change from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16

PROGRAMS_PER_PROCESSOR = 4
"""Programs that read at the same time on a multiprocessor, for shapes that were not measured."""


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Weight rows and columns of one step of a program, splits of the inner dimension, warps, pipeline stages."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int


MEASURED: dict[tuple[int, int], SkinnyTile] = {
    (3584, 3584): SkinnyTile(32, 256, 1, 4, 4),  # H200, 1 and 16 rows: 10.3 us against 12 and 13 of cuBLAS
    (37_888, 3584): SkinnyTile(64, 128, 1, 4, 3),  # 75 and 76 us against 81
    (3584, 18_944): SkinnyTile(64, 128, 4, 4, 4),  # 41 and 42 us against 44
    (152_064, 3584): SkinnyTile(64, 128, 1, 4, 4),  # 248 and 256 us against 259 and 264
}
"""Best tiles by (n, k) of the weight, from `scripts/bench_kernels.py --tune`. Other shapes take `chosen_tile`'s rule."""


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: SkinnyTile | None = None) -> Tensor:
    """`x [rows, k] @ weight [n, k].T + bias [n]`, summed in float32 and rounded once. At most 16 rows.

    tile overrides the table. Raises ValueError for more rows, or shapes and dtypes that do not fit.
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
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} in {bias.dtype} must be [{n}] in {x.dtype}.")
    tile = tile or chosen_tile(n, k, x.device)
    out = x.new_empty(rows, n)
    share = triton.cdiv(triton.cdiv(k, tile.splits), tile.k) * tile.k
    splits = triton.cdiv(k, share)
    partial = out if splits == 1 else x.new_empty(splits, rows, n, dtype=torch.float32)
    _skinny_kernel[(triton.cdiv(n, tile.n), splits)](
        x, weight, bias, partial, rows, n, k, share, x.stride(0), weight.stride(0),
        BLOCK_N=tile.n, BLOCK_K=tile.k, SPLIT=splits > 1, EVEN_K=k % tile.k == 0 and share * splits == k,
        EVEN_N=n % tile.n == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        block = 256
        sum_kernel[(triton.cdiv(n, block), rows)](
            partial, bias, out, rows, n, splits, BLOCK=block, num_warps=2
        )  # fmt: skip
    return out


def chosen_tile(n: int, k: int, device: torch.device) -> SkinnyTile:
    """The measured tile of a shape, or one that gives every multiprocessor a few programs."""
    found = MEASURED.get((n, k))
    if found is not None:
        return found
    block_n, block_k = 64, 128
    wanted = PROGRAMS_PER_PROCESSOR * processors(device)
    splits = max(1, min(wanted // triton.cdiv(n, block_n), triton.cdiv(k, 4 * block_k), 16))
    return SkinnyTile(block_n, block_k, splits, 4, 4)


@lru_cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x, weight, bias, out, rows, n, k, share, x_stride, weight_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid `(blocks of weight rows, splits)`. The weight is the tall operand of the product, x the narrow one."""
    row_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    column = split * share + tl.arange(0, BLOCK_K)
    end = tl.minimum(split * share + share, k)
    row_x = tl.arange(0, 16)
    weight_at = weight + row_n.to(tl.int64)[:, None] * weight_stride + column[None, :]
    x_at = x + row_x[None, :] * x_stride + column[:, None]
    acc = tl.zeros([BLOCK_N, 16], tl.float32)
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
        tl.store(out + row_x[None, :].to(tl.int64) * n + row_n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_kernel(partial, bias, out, rows, n, splits, BLOCK: tl.constexpr):
    """Grid `(blocks of columns, rows)`: the splits in their order, the bias, one rounding."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = column < n
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * rows + row) * n + column, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, total.to(out.dtype.element_ty), mask=mask)
