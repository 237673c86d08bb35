"""How quantised weights lie in memory: one layout for every file format, one row of bytes for each output feature.

A packed weight `[n, k]` is one uint8 tensor `[n, row_bytes]`. A row holds, one after the other, each part only if its
packing has it:

- codes: for 8 bits k bytes, in order. For 4 to 6 bits the low nibbles, k / 2 bytes: of each run of 32 weights, byte j
  (0 to 15) holds weight j in its low half and weight j + 16 in its high half;
- high bits (5 and 6 bits): for each run of 32 weights a little-endian uint32 for bit 4 and, with 6 bits, a second one
  for bit 5; bit j belongs to weight j;
- scales, then what the scheme has beside them (see `Scheme`);
- zeros up to a multiple of 16 bytes.

Rows are whole by themselves: weights that share their input can be stacked, permuted and cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

RUN = 32
"""Weights whose codes lie together. k is a multiple of it."""

SUPER = 256
"""Weights under one pair of fp16 scales in the two-level schemes."""

ROW_ALIGNMENT = 16


class Scheme(Enum):
    """What a weight w is, from its code q. Groups run along k."""

    SYMMETRIC = "symmetric"
    """`w = s * (q - 2 ** (bits - 1))`, codes unsigned; with 8 bits `w = s * q`, codes signed. One scale s per group."""
    ZEROS = "zeros"
    """`w = s * (q - z)`; z of as many bits as q (4 or 8). Beside the scales: the zeros, two 4-bit ones to a byte, the
    first low."""
    MINIMUM = "minimum"
    """`w = s * q + m`. Beside the scales: one m per group, in the scales' dtype."""
    TWO_LEVEL = "two_level"
    """`w = d * sc * q - dmin * mn`. Scales: fp16 pairs (d, dmin) per 256 weights; beside them uint8 pairs (sc, mn) per
    group of 32."""
    TWO_LEVEL_SIGNED = "two_level_signed"
    """`w = d * sc * (q - 32)`, 6 bits. Scales: fp16 d per 256 weights; beside them int8 sc per group of 16."""
    FLOAT8 = "float8"
    """`w = s * q`, q a float8_e4m3fn. One scale s per group."""


@dataclass(frozen=True)
class Packing:
    """The layout of one packed weight's rows.

    k: weights in a row, a multiple of 32. bits: 4, 5, 6 or 8. group: weights that share a scale, a divisor of k; in the
    two-level schemes 32 or 16. scale_bytes: 2 for fp16 scales, 4 for fp32. Raises ValueError for what cannot be.
    """

    scheme: Scheme
    bits: int
    k: int
    group: int
    scale_bytes: int = 2

    def __post_init__(self) -> None:
        two_level = {Scheme.TWO_LEVEL: 32, Scheme.TWO_LEVEL_SIGNED: 16}.get(self.scheme)
        allowed_bits = {
            Scheme.SYMMETRIC: (4, 5, 8), Scheme.ZEROS: (4, 8), Scheme.MINIMUM: (4, 5), Scheme.TWO_LEVEL: (4, 5),
            Scheme.TWO_LEVEL_SIGNED: (6,), Scheme.FLOAT8: (8,),
        }[self.scheme]  # fmt: skip
        if self.bits not in allowed_bits:
            raise ValueError(f"the scheme {self.scheme.value} has {allowed_bits} bits, not {self.bits}.")
        if self.k <= 0 or self.k % (SUPER if two_level else RUN):
            raise ValueError(f"k is {self.k}; it must be a multiple of {SUPER if two_level else RUN}.")
        if (
            self.group <= 0
            or self.k % self.group
            or self.group % (two_level or RUN)
            or self.group > (two_level or self.k)
        ):
            raise ValueError(
                f"groups of {self.group} weights do not fit k = {self.k} in the scheme {self.scheme.value}."
            )
        if self.scale_bytes not in (2, 4) or (two_level and self.scale_bytes != 2):
            raise ValueError(f"scales of {self.scale_bytes} bytes; they have 2 or 4, and 2 in two-level schemes.")

    @cached_property
    def high_at(self) -> int:
        """Offset in the row of the high bits; also the size of the codes before them."""
        return self.k if self.bits == 8 else self.k // 2

    @cached_property
    def scales_at(self) -> int:
        return self.high_at + (self.k // 8 * (self.bits - 4) if self.bits < 8 else 0)

    @cached_property
    def beside_at(self) -> int:
        """Offset of what the scheme has beside its scales."""
        if self.scheme is Scheme.TWO_LEVEL:
            return self.scales_at + self.k // SUPER * 4
        if self.scheme is Scheme.TWO_LEVEL_SIGNED:
            return self.scales_at + self.k // SUPER * 2
        return self.scales_at + self.groups * self.scale_bytes

    @cached_property
    def row_bytes(self) -> int:
        beside = {
            Scheme.ZEROS: (self.groups * self.bits + 7) // 8, Scheme.MINIMUM: self.groups * self.scale_bytes,
            Scheme.TWO_LEVEL: self.groups * 2, Scheme.TWO_LEVEL_SIGNED: self.groups,
        }.get(self.scheme, 0)  # fmt: skip
        return -(-(self.beside_at + beside) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def groups(self) -> int:
        """Groups in a row."""
        return self.k // self.group

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scale_bytes == 2 else torch.float32

    # -- to and from plain tensors: exact, and the reference for every kernel ------------------------------------------

    def pack(self, codes: Tensor, scales: Tensor, beside: Tensor | None = None) -> Tensor:
        """Rows of bytes `[n, row_bytes]`.

        codes: `[n, k]`, uint8 (int8 and float8_e4m3fn where the codes are such). scales: `[n, groups]`; two-level:
        `[n, k / 256, 2]` or `[n, k / 256]`. beside: zeros `[n, groups]` uint8, minima `[n, groups]`, or two-level
        `[n, groups, 2]` uint8 or `[n, groups]` int8.
        """
        n = codes.shape[0]
        out = torch.zeros(n, self.row_bytes, dtype=torch.uint8, device=codes.device)
        raw = codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes
        if self.bits == 8:
            out[:, : self.k] = raw
        else:
            runs = raw.view(n, -1, 2, 16)
            out[:, : self.high_at] = ((runs[:, :, 0] & 15) | (runs[:, :, 1] << 4)).reshape(n, -1)
            if self.bits > 4:
                out[:, self.high_at : self.scales_at] = self._high_bits(raw)
        self._put(out, self.scales_at, scales.to(self.scale_dtype))
        if beside is not None:
            if self.scheme is Scheme.ZEROS and self.bits == 4:
                padded = torch.nn.functional.pad(beside, (0, self.groups % 2))
                beside = padded[:, ::2] | (padded[:, 1::2] << 4)
            elif self.scheme is Scheme.MINIMUM:
                beside = beside.to(self.scale_dtype)
            self._put(out, self.beside_at, beside)
        return out

    def _high_bits(self, codes: Tensor) -> Tensor:
        weights = 1 << torch.arange(8, device=codes.device, dtype=torch.uint8)
        planes = [
            ((codes >> bit & 1).view(codes.shape[0], -1, 4, 8) * weights).sum(-1, dtype=torch.uint8)
            for bit in range(4, self.bits)
        ]
        return torch.stack(planes, dim=2).view(codes.shape[0], -1)

    @staticmethod
    def _put(out: Tensor, at: int, values: Tensor) -> None:
        # A clone: a column of width 1 counts as contiguous whatever its stride, and cannot be viewed as bytes then.
        raw = values.reshape(out.shape[0], -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        out[:, at : at + raw.shape[1]] = raw

    def codes(self, rows: Tensor) -> Tensor:
        """`[n, k]`: the codes of `rows[n, row_bytes]`, uint8; int8 or float8_e4m3fn where they are such."""
        n = rows.shape[0]
        raw = rows[:, : self.high_at]
        if self.bits == 8:
            kind = {Scheme.ZEROS: torch.uint8, Scheme.FLOAT8: torch.float8_e4m3fn}.get(self.scheme, torch.int8)
            return raw.contiguous().view(kind)
        runs = raw.reshape(n, -1, 1, 16)
        codes = torch.cat((runs & 15, runs >> 4), dim=2).view(n, self.k)
        if self.bits > 4:
            planes = rows[:, self.high_at : self.scales_at].reshape(n, -1, self.bits - 4, 4, 1)
            bits = planes >> torch.arange(8, device=rows.device, dtype=torch.uint8) & 1
            for plane in range(self.bits - 4):
                codes |= bits[:, :, plane].reshape(n, self.k) << (4 + plane)
        return codes

    def _read(self, rows: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
        return rows[:, at : at + count * dtype.itemsize].contiguous().view(dtype)

    def affine(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 `(a, b)`, each `[n, groups]`, with `w = a * q + b` for every weight of a group (codes as in `codes`)."""
        groups, dtype = self.groups, self.scale_dtype
        if self.scheme is Scheme.TWO_LEVEL:
            d = self._read(rows, self.scales_at, self.k // SUPER * 2, dtype).float().view(rows.shape[0], -1, 1, 2)
            sub = self._read(rows, self.beside_at, groups * 2, torch.uint8).float().view(rows.shape[0], -1, 8, 2)
            a, b = (d * sub).flatten(1, 2).unbind(-1)
            return a, -b
        if self.scheme is Scheme.TWO_LEVEL_SIGNED:
            d = self._read(rows, self.scales_at, self.k // SUPER, dtype).float().unsqueeze(-1)
            sub = self._read(rows, self.beside_at, groups, torch.int8).float().view(rows.shape[0], -1, 16)
            a = (d * sub).flatten(1)
            return a, a * -32
        a = self._read(rows, self.scales_at, groups, dtype).float()
        if self.scheme is Scheme.MINIMUM:
            return a, self._read(rows, self.beside_at, groups, dtype).float()
        if self.scheme is Scheme.ZEROS:
            return a, -a * self._zeros(rows).float()
        if self.scheme is Scheme.SYMMETRIC and self.bits < 8:
            return a, a * -(1 << (self.bits - 1))
        return a, torch.zeros_like(a)

    def _zeros(self, rows: Tensor) -> Tensor:
        if self.bits == 8:
            return self._read(rows, self.beside_at, self.groups, torch.uint8)
        raw = self._read(rows, self.beside_at, (self.groups + 1) // 2, torch.uint8).unsqueeze(-1)
        return torch.cat((raw & 15, raw >> 4), dim=-1).view(rows.shape[0], -1)[:, : self.groups]

    def dense(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[n, k]`: the weights of `rows[n, row_bytes]`, computed in fp32 and rounded once to `dtype`."""
        a, b = self.affine(rows)
        codes = self.codes(rows).float().view(rows.shape[0], self.groups, self.group)
        if self.scheme is Scheme.ZEROS:  # the difference of integers first: what AWQ files mean, bit for bit
            return ((codes - self._zeros(rows).float().unsqueeze(-1)) * a.unsqueeze(-1)).flatten(1).to(dtype)
        return torch.addcmul(b.unsqueeze(-1), codes, a.unsqueeze(-1)).flatten(1).to(dtype)


def in_pieces(rows: int, row_bytes: int, budget_bytes: int, work: Callable[[int, int], None]) -> None:
    """Call `work(from, to)` over `rows`, so many at a time that they hold about `budget_bytes`."""
    step = max(1, budget_bytes // max(1, row_bytes))
    for start in range(0, rows, step):
        work(start, min(rows, start + step))
