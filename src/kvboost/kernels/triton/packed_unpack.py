# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Packed rows to dense ones: whole weights on their way to cuBLAS, and the rows of an embedding that tokens name.

As `Packing.dense`: fp32, the difference of integers first, one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.packed_codes import decoded_bytes, decoded_halves, layout
from kvboost.kernels.triton.packed_linear import check_rows
from kvboost.weights.packing import RUN, Packing

RUNS = 16
"""Runs of 32 weights in a row of a program: 256 bytes of 4-bit codes, 1 KiB of fp16."""


def unpack(weight: Tensor, packing: Packing, out: Tensor) -> Tensor:
    """Fill `out [n, k]`, in bf16, fp16 or fp32, with the weights of `weight [n, packing.row_bytes]`, and return it.

    Raises ValueError where they do not fit each other.
    """
    check_rows(weight, packing)
    if out.shape != (weight.shape[0], packing.k) or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} must be a contiguous [{weight.shape[0]}, {packing.k}].")
    _launch(weight, None, packing, out, rows_together=8)
    return out


def look_up(index: Tensor, weight: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """`[tokens, k]` in `dtype`: the rows of `weight [n, packing.row_bytes]` that `index [tokens]` names, in one launch.

    The index stays on the device, where nothing can be raised: a row that the table does not have comes back as NaN.
    Raises ValueError for a weight that does not fit, or an index that is no vector of integers.
    """
    check_rows(weight, packing)
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"index {tuple(index.shape)} in {index.dtype} must be a vector of int64 or int32.")
    out = torch.empty(index.shape[0], packing.k, dtype=dtype, device=weight.device)
    _launch(weight, index.contiguous(), packing, out, rows_together=1)
    return out


def _launch(weight: Tensor, index: Tensor | None, packing: Packing, out: Tensor, rows_together: int) -> None:
    if out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"weights are unpacked to bf16, fp16 or fp32, not {out.dtype}.")
    if not out.shape[0]:
        return
    runs = packing.k // RUN
    _unpack_kernel[(triton.cdiv(out.shape[0], rows_together), triton.cdiv(runs, RUNS))](
        weight, index, out, out.shape[0], weight.shape[0], packing.k, weight.stride(0), **layout(packing, torch.float32),
        ROWS=rows_together, RUNS=RUNS, EVEN=runs % RUNS == 0, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "n"])
def _unpack_kernel(
    weight, index, out, rows, n, k, row_bytes, high_at, scales_at, beside_at,
    SCHEME: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE_SCALES: tl.constexpr, MAGIC: tl.constexpr,
    PTX: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid `(blocks of ROWS rows of out, blocks of RUNS runs)`. Without an index, row i of out is row i of the weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * RUNS
    end = k // 32
    source = tl.minimum(row, rows - 1)
    if index is not None:
        source = tl.load(index + source).to(tl.int64)
    exists = ((source >= 0) & (source < n))[:, None]
    base = weight + tl.minimum(tl.maximum(source, 0), n - 1)[:, None] * row_bytes
    target = out + row[:, None] * k
    inside = (row < rows)[:, None]
    if BITS == 8:
        column = first * 32 + tl.arange(0, RUNS * 32)[None, :]
        w = decoded_bytes(base, first, end, scales_at, beside_at, RUNS, SCHEME, GROUP, WIDE_SCALES, EVEN)
        w = tl.where(exists, w, float("nan"))
        tl.store(target + column, w.to(out.dtype.element_ty), mask=inside & (column < k))
    else:
        byte = tl.arange(0, RUNS * 16)[None, :]
        column = first * 32 + byte // 16 * 32 + byte % 16
        low, high = decoded_halves(
            base, first, end, high_at, scales_at, beside_at, RUNS, tl.float32, SCHEME, BITS, GROUP, WIDE_SCALES,
            MAGIC, PTX, EVEN,
        )  # fmt: skip
        inside = inside & (column < k)
        tl.store(target + column, tl.where(exists, low, float("nan")).to(out.dtype.element_ty), mask=inside)
        tl.store(target + column + 16, tl.where(exists, high, float("nan")).to(out.dtype.element_ty), mask=inside)
