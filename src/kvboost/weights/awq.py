"""AWQ checkpoints in GEMM format, read and written.

For a linear of k inputs and n outputs: `qweight` int32 `[k, n / 8]`, `qzeros` int32 `[k / g, n / 8]`, `scales`
`[k / g, n]`; `W[j, i] = (q[i, j] - z[i / g, j]) * s[i / g, j]`. A word holds eight neighbouring columns, nibble i of it the
column `ORDER[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvboost.errors import ModelLoadError
from kvboost.weights.packing import Scheme
from kvboost.weights.stored import PackedRows, StoredLinear, group_size, listed, nibbles, scale_bytes

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = tuple(ORDER.index(column) for column in range(8))
"""Nibble of a word that holds each column."""


class AwqFormat:
    """AWQ GEMM, 4 bits."""

    label = "AWQ"
    marker = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: `quantization_config`. Raises `ModelLoadError` for other variants, by name."""
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if config.get("backend") == "llm-awq":
            version = "llm-awq"
        if version != "gemm":
            raise ModelLoadError(
                f"quantization_config: AWQ version {version!r} lays its weights out for one kernel; only 'gemm' is read. "
                "Use a GEMM checkpoint, or make one: kvboost quantize MODEL OUT --method awq."
            )
        bits = config.get("bits", config.get("w_bit", 4))
        if type(bits) is not int or bits != 4:
            raise ModelLoadError(f"quantization_config: AWQ with bits={bits!r}; only 4 is read.")
        if config.get("zero_point", True) is not True:
            raise ModelLoadError("quantization_config: AWQ with zero_point=false has no zeros in GEMM format.")
        self._group = group_size(config.get("group_size", config.get("q_group_size", 128)))
        self._dense = tuple(map(str, config.get("modules_to_not_convert") or ()))

    def parts(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def is_dense(self, module: str) -> bool:
        return listed(module, self._dense)

    def rows(self, linear: StoredLinear) -> PackedRows:
        n, k = linear.n, linear.k
        group = k if self._group == -1 else self._group
        if n % 8 or k % group:
            linear.fail(f"{k} inputs and {n} outputs do not fit groups of {group} and words of 8")
        words = linear.read("qweight", [torch.int32], (k, n // 8))
        zeros = linear.read("qzeros", [torch.int32], (k // group, n // 8))
        scales = linear.scales("scales", (k // group, n))
        packing = linear.packing(Scheme.ZEROS, 4, k, group, scale_bytes(scales))

        def rows(start: int, end: int) -> Tensor:
            return packing.pack(
                _columns(words, start, end).T.contiguous(),
                scales[:, start:end].T,
                _columns(zeros, start, end).T.contiguous(),
            )

        return PackedRows(packing, rows)


def _columns(words: Tensor, start: int, end: int) -> Tensor:
    """uint8 `[rows, end - start]` of int32 `[rows, n / 8]`."""
    values = nibbles(words[:, start // 8 : end // 8], 4)
    return values.view(words.shape[0], -1, 8)[:, :, list(INVERSE)].flatten(1)


def pack_words(values: Tensor) -> Tensor:
    """int32 `[rows, n / 8]` of uint8 `[rows, n]`: the inverse of how a file is read."""
    ordered = values.view(values.shape[0], -1, 8)[:, :, list(ORDER)]
    pairs = ordered[:, :, ::2] | (ordered[:, :, 1::2] << 4)
    return pairs.contiguous().view(torch.int32).flatten(1)


def quantization_config(group: int, dense: list[str]) -> dict[str, Any]:
    """What `config.json` says about a checkpoint written by us."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "modules_to_not_convert": dense or None,
    }
