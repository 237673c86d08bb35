"""Products with packed weights on a GPU: fused with unpacking for few rows (4-bit codes and up to 16 rows in CUDA C++, the
rest in Triton), unpacked in pieces for cuBLAS for many."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvboost.kernels.cuda import packed_few
from kvboost.kernels.triton.packed_linear import check_product, matrix_units, packed_few_rows
from kvboost.kernels.triton.packed_unpack import look_up, unpack
from kvboost.weights.packing import Packing, in_pieces

__all__ = ["look_up", "packed_many_rows", "packed_product", "unpack"]

FUSED_ROWS = 128
"""Rows up to which the fused kernel is used. A rule, from bytes, until it is measured: unpacking 4-bit weights writes and
reads 4 bytes a weight where the fused kernel reads half a byte for every 64 rows, so it must win up to a few times 64."""

FUSED_ROWS_WITHOUT_UNITS = 16
"""The same where the fused kernel has no matrix units, and so multiplies all of 16 rows one by one."""

UNPACKED_BYTES = 32 << 20
"""Of a weight, unpacked at a time: little beside the packed bytes on an 8 GB card, and what the L2 cache of large GPUs
holds (50 MB on an H200), so cuBLAS may find there what was just written."""


def packed_product(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """`x [rows, k] @ W.T + bias [n]` in x's dtype; weight: uint8 `[n, packing.row_bytes]`.

    Everything can be captured in a CUDA graph. Raises ValueError for shapes and dtypes that do not fit.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if packed_few.serves(x, weight, packing, bias):
        return packed_few.packed_few(x, weight, packing, bias)
    fused = FUSED_ROWS if matrix_units(x.dtype, x.device) else FUSED_ROWS_WITHOUT_UNITS
    if 0 < x.shape[0] <= fused:
        return packed_few_rows(x, weight, packing, bias)
    return packed_many_rows(x, weight, packing, bias)


def packed_many_rows(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """The same by cuBLAS, from at most about `UNPACKED_BYTES` of unpacked weights at a time."""
    check_product(x, weight, packing, bias)
    n = weight.shape[0]
    rows_together = max(1, UNPACKED_BYTES // (packing.k * x.element_size()))
    dense = x.new_empty(min(n, rows_together), packing.k)
    if n <= rows_together:
        return linear(x, unpack(weight, packing, dense), bias)
    out = x.new_empty(x.shape[0], n)

    def piece(start: int, end: int) -> None:
        columns, part = out[:, start:end], unpack(weight[start:end], packing, dense[: end - start])
        if bias is None:
            torch.mm(x, part.T, out=columns)
        else:
            torch.addmm(bias[start:end], x, part.T, out=columns)

    in_pieces(n, packing.k * x.element_size(), UNPACKED_BYTES, piece)
    return out
