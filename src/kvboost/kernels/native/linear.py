"""Products with weights as PyTorch holds them, dense or packed, by the compiled kernels. CPU, fp32 and bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvboost.kernels.native.library import DTYPES, PackedRows, Weight, Weights, load, unavailable
from kvboost.weights.packing import Packing, Scheme

DOT_ROWS_MAX = 16
"""Rows up to which dot products along k beat a blocked product in fp32 (33 against 37 ms for SmolLM2 at 16 rows)."""

AMX_ROWS_MAX = 2048
"""Rows up to which AMX over the weight as it lies, and whole layers as one call, beat oneDNN, which packs the weight
first (SmolLM2 in bf16: a prompt of 1,050 tokens takes 410 against 500 ms, one of 2,040 tokens 1,050 against 1,280)."""

VECTOR_ROWS_MAX = 2048
"""The same without AMX, on an AMD EPYC with bf16 products: those of 16 to 128 rows take 1.2 to 1.5 times as long in PyTorch in both
dtypes, of 1,050 as long."""

_SCHEMES = {
    Scheme.SYMMETRIC: 1, Scheme.ZEROS: 2, Scheme.MINIMUM: 3, Scheme.TWO_LEVEL: 4, Scheme.TWO_LEVEL_SIGNED: 5,
    Scheme.FLOAT8: 6,
}  # fmt: skip
"""`Scheme` of packed.h."""


class Piece(NamedTuple):
    """Rows of a weight: `[n, k]` in the dtype of what they are multiplied with, or uint8 `[n, packing.row_bytes]`."""

    weight: Tensor
    bias: Tensor | None = None
    packing: Packing | None = None

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1] if self.packing is None else self.packing.k


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can compute with `x[rows, k]` and a packed weight; they know no gradients."""
    return can_unpack(weight, x.dtype) and not (x.requires_grad and torch.is_grad_enabled())


def can_unpack(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.device.type == "cpu" and weight.is_contiguous() and dtype in DTYPES and unavailable() is None


def rows_max(dtype: torch.dtype, pieces: Sequence[Piece]) -> int:
    """Rows up to which `linear` is the fastest product with these weights."""
    packed = all(piece.packing is not None for piece in pieces)
    bf16 = dtype == torch.bfloat16
    if bf16 and load().kvb_has_amx() and pieces[0].k % 32 == 0 and all(piece.n % 32 == 0 for piece in pieces):
        return AMX_ROWS_MAX
    if load().kvb_has_vectors(bf16) and pieces[0].k % 2 == 0:
        return VECTOR_ROWS_MAX
    return DOT_ROWS_MAX if packed or not bf16 else 1


def weights_of(pieces: Sequence[Piece], dtype: torch.dtype) -> Weights:
    """The struct that `linear` takes, to multiply rows of `dtype`. At most 3 pieces.

    It holds addresses: the tensors must stay where they are. Raises TypeError when one has another dtype, ValueError when
    packed rows are not as long as their packing says.
    """
    for weight, bias, packing in pieces:
        if packing is not None:
            _check(weight, packing)
        if (packing is None and weight.dtype != dtype) or (bias is not None and bias.dtype != dtype):
            raise TypeError(f"weights of {weight.dtype} and biases must have the dtype of what they multiply, {dtype}.")
    out = Weights(count=len(pieces), n=sum(piece.n for piece in pieces), k=pieces[0].k)
    for i, (weight, bias, packing) in enumerate(pieces):
        out.pieces[i] = Weight(
            weight.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[0], packed_rows(packing)
        )
    return out


def packed_rows(packing: Packing | None) -> PackedRows:
    """The struct of a packing; zeros for dense weights."""
    if packing is None:
        return PackedRows()
    p = packing
    return PackedRows(
        _SCHEMES[p.scheme], p.bits, p.group, p.scale_bytes, p.high_at, p.scales_at, p.beside_at, p.row_bytes
    )


def linear(x: Tensor, weights: Weights) -> Tensor:
    """`x[rows, k] @ W.T + bias`, `[rows, n]`. x: fp32 or bf16 as dense weights and biases are, at least one row, the
    elements of a row one after the other. Raises ValueError when x has another width."""
    if x.shape[1] != weights.k:
        raise ValueError(f"rows of {x.shape[1]} elements do not fit weights with rows of {weights.k}.")
    out = x.new_empty(x.shape[0], weights.n)
    load().kvb_linear(
        x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), ctypes.addressof(weights), out.data_ptr(), x.shape[0],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def unpack(
    weight: Tensor, packing: Packing, dtype: torch.dtype, index: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`[rows, k]`: the dense rows of a contiguous packed weight, those named by `index[rows]` (int64) or all of them.

    dtype: fp32 or bf16. out: contiguous memory for the result. Raises IndexError for an index that is out of range.
    """
    _check(weight, packing)
    if index is not None:
        index = index.contiguous()
    rows = weight.shape[0] if index is None else index.shape[0]
    if out is None:
        out = torch.empty(rows, packing.k, dtype=dtype)
    elif out.shape != (rows, packing.k) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {dtype} [{rows}, {packing.k}], not {out.dtype} {list(out.shape)}.")
    struct = packed_rows(packing)
    bad = load().kvb_unpack(
        dtype == torch.bfloat16, weight.data_ptr(), ctypes.addressof(struct), weight.shape[0], packing.k,
        None if index is None else index.data_ptr(), out.data_ptr(), rows, torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        assert index is not None
        raise IndexError(
            f"row {int(index[bad])} of a weight of {weight.shape[0]} rows; give 0 to {weight.shape[0] - 1}."
        )
    return out


def _check(weight: Tensor, packing: Packing) -> None:
    if weight.dtype != torch.uint8 or weight.dim() != 2 or weight.shape[1] != packing.row_bytes:
        raise ValueError(f"a packed weight is uint8 [n, {packing.row_bytes}], not {weight.dtype} {list(weight.shape)}.")
