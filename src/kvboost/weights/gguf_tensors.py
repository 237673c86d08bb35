"""From the blocks of GGUF files to packed rows, bit for bit, and to dense weights where rows do not serve.

A block holds 32 or 256 weights with their scales; a row of `weights.packing` holds the same bits by kind. Nothing is
computed: codes, scales and minima are moved. Facts about blocks: the reference dequantisation of the `gguf` package,
against which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvboost.weights.gguf_reader import Bytes, TensorData, TensorInfo
from kvboost.weights.gguf_types import FLOATS
from kvboost.weights.packing import Packing, Scheme, in_pieces

PIECE_BYTES = 4 << 20
"""Of a file, converted at a time: what is held beside the model."""

_SCHEMES = {
    "Q4_0": (Scheme.SYMMETRIC, 4, 32), "Q4_1": (Scheme.MINIMUM, 4, 32), "Q5_0": (Scheme.SYMMETRIC, 5, 32),
    "Q5_1": (Scheme.MINIMUM, 5, 32), "Q8_0": (Scheme.SYMMETRIC, 8, 32), "Q4_K": (Scheme.TWO_LEVEL, 4, 32),
    "Q5_K": (Scheme.TWO_LEVEL, 5, 32), "Q6_K": (Scheme.TWO_LEVEL_SIGNED, 6, 16),
}  # fmt: skip


def packing_of(info: TensorInfo) -> Packing | None:
    """How the rows of a matrix are kept packed; None for types that are not (floats, Q2_K, Q3_K, IQ*)."""
    if info.type.name not in _SCHEMES or len(info.shape) != 2:
        return None
    scheme, bits, group = _SCHEMES[info.type.name]
    return Packing(scheme, bits, info.shape[-1], group)


def readable(info: TensorInfo) -> bool:
    """Whether the tensor can be a weight: a float type, or one that the `gguf` package unpacks."""
    if info.type.name in FLOATS or info.type.name in _SCHEMES:
        return True
    from gguf import quants

    return any(int(kind) == info.type.number for kind in quants._type_traits)


def fill_packed(data: TensorData, info: TensorInfo, packing: Packing, out: Tensor) -> None:
    """Write the rows of `info` into `out[rows, packing.row_bytes]`, on any device, a piece at a time."""
    convert = _CONVERT[info.type.name]

    def piece(start: int, end: int) -> None:
        raw = data.rows(info, start, np.empty((end - start, info.row_bytes), np.uint8))
        rows = np.zeros((end - start, packing.row_bytes), np.uint8)
        convert(raw.reshape(end - start, -1, info.type.block_bytes), rows, packing)
        out[start:end].copy_(torch.from_numpy(rows))

    in_pieces(info.rows, info.row_bytes, PIECE_BYTES, piece)


def fill_dense(data: TensorData, info: TensorInfo, out: Tensor, offset: float = 0.0) -> None:
    """Write the weights of `info`, plus `offset` in fp32, into `out` of its shape; rounded once to its dtype."""
    rows = out.view(info.rows, info.shape[-1])

    def piece(start: int, end: int) -> None:
        raw = data.rows(info, start, np.empty((end - start, info.row_bytes), np.uint8))
        values = _floats(raw, info)
        rows[start:end].copy_(values + offset if offset else values)

    in_pieces(info.rows, max(info.row_bytes, info.shape[-1] * 4), PIECE_BYTES, piece)


def _floats(raw: Bytes, info: TensorInfo) -> Tensor:
    """`[rows, k]`: fp32, or what a float tensor holds."""
    if info.type.name in FLOATS:
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.type.name]
        values = torch.from_numpy(raw).view(kind)
        return values.float()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(np.ascontiguousarray(dequantize(raw, GGMLQuantizationType(info.type.number))))


# -- the moves: `blocks[n, blocks, block_bytes]` into zeroed `rows[n, row_bytes]` ------------------------------------


def _runs_of_32(minimum: bool, high: bool) -> Callable[[Bytes, Bytes, Packing], None]:
    """Q4_0 to Q5_1: scale, minimum, high bits and nibbles stand in that order, the nibbles in ours."""
    m_at, h_at = 2, 4 if minimum else 2
    codes_at = h_at + (4 if high else 0)

    def move(blocks: Bytes, rows: Bytes, packing: Packing) -> None:
        _put(rows, 0, blocks[:, :, codes_at:])
        _put(rows, packing.scales_at, blocks[:, :, :2])
        if high:
            _put(rows, packing.high_at, blocks[:, :, h_at:codes_at])
        if minimum:
            _put(rows, packing.beside_at, blocks[:, :, m_at:h_at])

    return move


def _q8_0(blocks: Bytes, rows: Bytes, packing: Packing) -> None:
    _put(rows, 0, blocks[:, :, 2:])
    _put(rows, packing.scales_at, blocks[:, :, :2])


def _k4_k5(high: bool) -> Callable[[Bytes, Bytes, Packing], None]:
    """Q4_K, Q5_K: d, dmin, 12 bytes of 6-bit scales and minima, high bits, nibbles of 4 x 64 weights (low 32, high 32)."""

    def move(blocks: Bytes, rows: Bytes, packing: Packing) -> None:
        n, count = blocks.shape[:2]
        codes_at = 48 if high else 16
        _put(rows, 0, _nibbles(blocks[:, :, codes_at:].reshape(n, count, 4, 32)))
        _put(rows, packing.scales_at, blocks[:, :, :4])
        _put(rows, packing.beside_at, _six_bits(blocks[:, :, 4:16]))
        if high:
            bits = blocks[:, :, None, 16:48] & (1 << np.arange(8, dtype=np.uint8))[:, None]
            _put(rows, packing.high_at, np.packbits(bits, axis=-1, bitorder="little"))

    return move


def _q6_k(blocks: Bytes, rows: Bytes, packing: Packing) -> None:
    """Low nibbles of 2 x (64 low, 64 high), pairs of high bits of 2 x (4 x 32), 16 int8 scales, d."""
    n, count = blocks.shape[:2]
    nibbles = _nibbles(blocks[:, :, :128].reshape(n, count, 2, 2, 32))  # half, part, (low run, high run)
    _put(rows, 0, nibbles.reshape(n, count, 2, 2, 2, 16).swapaxes(3, 4))
    pairs = blocks[:, :, 128:192].reshape(n, count, 2, 1, 32)
    bits = pairs & (1 << np.arange(8, dtype=np.uint8))[:, None]  # of run r: bit 4 at 2r, bit 5 at 2r + 1
    _put(rows, packing.high_at, np.packbits(bits, axis=-1, bitorder="little"))
    _put(rows, packing.scales_at, blocks[:, :, 208:210])
    _put(rows, packing.beside_at, blocks[:, :, 192:208])


def _nibbles(codes: Bytes) -> Bytes:
    """`[..., 32]` bytes with a run of 32 weights in their low and one in their high halves, as `[..., 2, 16]`."""
    first, second = codes[..., :16], codes[..., 16:]
    out = np.empty((*codes.shape[:-1], 2, 16), np.uint8)
    np.bitwise_or(first & 15, second << 4, out=out[..., 0, :])
    np.bitwise_or(first >> 4, second & 0xF0, out=out[..., 1, :])
    return out


def _six_bits(packed: Bytes) -> Bytes:
    """`[..., 12]` bytes to the pairs (scale, minimum) `[..., 8, 2]` of 8 groups."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((a & 63, c & 15 | (a >> 6) << 4), axis=-1)
    minima = np.concatenate((b & 63, c >> 4 | (b >> 6) << 4), axis=-1)
    return np.stack((scales, minima), axis=-1)


def _put(rows: Bytes, at: int, values: Bytes) -> None:
    """Copy `values[n, ...]` into `rows[n, at:]`, one strided copy whatever their layout."""
    inner = values.shape[1:]
    strides = [prod(inner[i + 1 :]) for i in range(len(inner))]
    target = np.lib.stride_tricks.as_strided(rows[:, at:], values.shape, (rows.strides[0], *strides))
    target[...] = values


_CONVERT: dict[str, Callable[[Bytes, Bytes, Packing], None]] = {
    "Q4_0": _runs_of_32(minimum=False, high=False), "Q4_1": _runs_of_32(minimum=True, high=False),
    "Q5_0": _runs_of_32(minimum=False, high=True), "Q5_1": _runs_of_32(minimum=True, high=True),
    "Q8_0": _q8_0, "Q4_K": _k4_k5(high=False), "Q5_K": _k4_k5(high=True), "Q6_K": _q6_k,
}  # fmt: skip
