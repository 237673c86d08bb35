"""GPTQ checkpoints of 4 and 8 bits.

For a linear of k inputs and n outputs: `qweight` int32 `[k * bits / 32, n]`, codes of neighbouring inputs in a word, low
bits first; `qzeros` int32 `[k / g, n * bits / 32]`; `scales` `[k / g, n]`; `g_idx` int32 `[k]`, the group of each input.
`W[j, i] = (q[i, j] - z[g_idx[i], j]) * s[g_idx[i], j]`. Version 1 stores each zero less one, version 2 as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvboost.errors import ModelLoadError
from kvboost.weights.packing import Scheme
from kvboost.weights.stored import PackedRows, StoredLinear, group_size, listed, nibbles, scale_bytes

ONES = {4: 0x11111111, 8: 0x01010101}
"""One in each value of a word. Added to whole words: version 1 subtracted it from whole words, borrows included."""


class GptqFormat:
    """GPTQ, 4 or 8 bits, groups in the order of the inputs."""

    label = "GPTQ"
    marker = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: `quantization_config`. Raises `ModelLoadError` for other variants, by name."""
        kind = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if config.get("is_marlin_format"):
            kind = "marlin"
        if kind not in ("gptq", "gptq_v2"):
            raise ModelLoadError(
                f"quantization_config: GPTQ checkpoint_format {kind!r}; 'gptq' and 'gptq_v2' are read."
            )
        self._stored_less = 1 if kind == "gptq" else 0
        bits = config.get("bits")
        if type(bits) is not int or bits not in ONES:
            raise ModelLoadError(f"quantization_config: GPTQ with bits={bits!r}; 4 and 8 are read.")
        self._bits: int = bits
        self._group = group_size(config.get("group_size", 128))
        dynamic = config.get("dynamic") or {}
        if any(not str(rule).startswith("-:") for rule in dynamic):
            raise ModelLoadError("quantization_config: GPTQ with 'dynamic' bits per module is not read.")
        self._dense = tuple(map(str, config.get("modules_to_not_convert") or ()))

    def parts(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    def is_dense(self, module: str) -> bool:
        return listed(module, self._dense)

    def rows(self, linear: StoredLinear) -> PackedRows:
        n, k, bits = linear.n, linear.k, self._bits
        group, in_word = k if self._group == -1 else self._group, 32 // bits
        if k % group or k % in_word or n % in_word:
            linear.fail(f"{k} inputs and {n} outputs do not fit groups of {group} and words of {in_word}")
        self._check_order(linear, group)
        words = linear.read("qweight", [torch.int32], (k // in_word, n))
        scales = linear.scales("scales", (k // group, n))
        zeros = linear.read("qzeros", [torch.int32], (k // group, n // in_word))
        zeros = nibbles(zeros + ONES[bits] * self._stored_less, bits)
        middle = 1 << (bits - 1)
        symmetric = bool((zeros == middle).all())
        packing = linear.packing(Scheme.SYMMETRIC if symmetric else Scheme.ZEROS, bits, k, group, scale_bytes(scales))

        def rows(start: int, end: int) -> Tensor:
            codes = nibbles(words[:, start:end].T, bits)
            if not symmetric:
                return packing.pack(codes, scales[:, start:end].T, zeros[:, start:end].T.contiguous())
            if bits == 8:
                codes = (codes ^ 128).view(torch.int8)  # less 128
            return packing.pack(codes, scales[:, start:end].T)

        return PackedRows(packing, rows)

    @staticmethod
    def _check_order(linear: StoredLinear, group: int) -> None:
        if not linear.has("g_idx"):
            return
        found = linear.read("g_idx", [torch.int32, torch.int64], (linear.k,))
        if not bool((found == torch.arange(linear.k, device=found.device) // group).all()):
            linear.fail(
                "g_idx is not in the order of the inputs (GPTQ with desc_act=true, 'act-order'): its groups are scattered, "
                "which packed rows cannot hold. Use a checkpoint with desc_act=false"
            )
