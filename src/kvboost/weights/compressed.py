"""compressed-tensors checkpoints that quantise weights only, and block-quantised fp8 checkpoints.

For a linear of k inputs and n outputs, by format:
- pack-quantized: `weight_packed` int32 `[n, k * bits / 32]`, each signed code moved to unsigned, low bits first;
  `weight_scale` `[n, groups]`; `weight_zero_point`, where asymmetric, packed the same way along n, or int8 `[n, groups]`;
- int-quantized: `weight` int8 `[n, k]`, with the same scales, and int8 zero points;
- float-quantized: `weight` float8_e4m3fn `[n, k]`, `weight_scale` `[n, 1]`, `[1]` or of blocks;
- fp8: `weight` float8_e4m3fn, `weight_scale_inv` `[n / block, k / block]` (rounded up).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvboost.errors import ModelLoadError
from kvboost.weights.packing import Packing, Scheme
from kvboost.weights.stored import PackedRows, StoredLinear, group_size, listed, nibbles, scale_bytes

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")

STRATEGIES = ("tensor", "channel", "group", "block")


def _refuse(what: str) -> ModelLoadError:
    return ModelLoadError(f"quantization_config: {what} Weight-only int4, int8 and fp8 checkpoints are read.")


class CompressedTensorsFormat:
    """compressed-tensors with plain weights: int4 and int8 in words, int8, fp8; activations as they are."""

    label = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: `quantization_config`. Raises `ModelLoadError` for other variants, by name."""
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise _refuse("compressed-tensors with sparse weights.")
        if config.get("kv_cache_scheme"):
            raise _refuse("compressed-tensors with a kv_cache_scheme (quantised keys and values).")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise _refuse(f"compressed-tensors with {len(groups or ())} config_groups; one is read.")
        (group,) = groups.values()
        for part in ("input_activations", "output_activations"):
            if group.get(part):
                raise _refuse(f"compressed-tensors with quantised activations ({part}, such as W8A8).")
        targets = group.get("targets") or ["Linear"]
        if targets != ["Linear"]:
            raise _refuse(f"compressed-tensors with targets {targets}; ['Linear'] is read.")
        self._format = group.get("format") or config.get("format")
        if self._format not in FORMATS:
            raise _refuse(f"compressed-tensors format {self._format!r}; allowed: {', '.join(FORMATS)}.")
        self._read_weights(group.get("weights") or {})
        # Patterns ("re:...") are left alone: a regular expression from a file may run for hours, and what the tensors
        # are says the same.
        self._ignore = tuple(name for name in map(str, config.get("ignore") or ()) if not name.startswith("re:"))
        self.marker = "weight_packed" if self._format == "pack-quantized" else "weight_scale"

    def _read_weights(self, weights: Mapping[str, Any]) -> None:
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        self._float = kind == "float"
        allowed = {"pack-quantized": ((4, "int"), (8, "int")), "int-quantized": ((8, "int"),)}
        if type(bits) is not int or (bits, kind) not in allowed.get(str(self._format), ((8, "float"), (8, "int"))):
            raise _refuse(f"compressed-tensors {self._format} with {bits!r} bits of type {kind!r}.")
        self._bits: int = bits
        self._symmetric = bool(weights.get("symmetric", True))
        self._strategy = weights.get("strategy") or "tensor"
        if self._strategy not in STRATEGIES or weights.get("dynamic"):
            raise _refuse(f"compressed-tensors with weights of strategy {self._strategy!r}.")
        if self._float and not self._symmetric:
            raise _refuse("compressed-tensors with asymmetric fp8 weights.")
        self._group = group_size(weights.get("group_size")) if self._strategy == "group" else -1
        self._block = _block(weights.get("block_structure")) if self._strategy == "block" else None

    def parts(self) -> tuple[str, ...]:
        names = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
        return (*names, "weight_packed" if self._format == "pack-quantized" else "weight")

    def is_dense(self, module: str) -> bool:
        return listed(module, self._ignore)

    def rows(self, linear: StoredLinear) -> PackedRows:
        if self._float:
            return float8_rows(linear, "weight_scale", self._block)
        n, k, bits = linear.n, linear.k, self._bits
        group = k if self._group == -1 else self._group
        if k % group or (self._format == "pack-quantized" and k % (32 // bits)):
            linear.fail(f"{k} inputs do not fit groups of {group}")
        self._check_shape(linear, group)
        shapes = [(n, k // group)] if self._strategy == "group" else [(n, 1), (n,), (1,), ()]
        scales = linear.scales("weight_scale", *shapes).reshape(-1, k // group).expand(n, -1)
        zeros = None if self._symmetric else self._zeros(linear, k // group)
        packing = linear.packing(
            Scheme.SYMMETRIC if zeros is None else Scheme.ZEROS, bits, k, group, scale_bytes(scales)
        )
        if self._format == "pack-quantized":
            stored = linear.read("weight_packed", [torch.int32], (n, k * bits // 32))
        else:
            stored = linear.read("weight", [torch.int8], (n, k))

        def rows(start: int, end: int) -> Tensor:
            piece = stored[start:end]
            codes = piece.view(torch.uint8) ^ 128 if piece.dtype == torch.int8 else nibbles(piece, bits)
            if zeros is not None:
                return packing.pack(codes, scales[start:end], zeros[start:end])
            if bits == 8:
                codes = (codes ^ 128).view(torch.int8)
            return packing.pack(codes, scales[start:end])

        return PackedRows(packing, rows)

    def _zeros(self, linear: StoredLinear, groups: int) -> Tensor:
        """uint8 `[n, groups]`, moved to unsigned as the codes are."""
        n, bits = linear.n, self._bits
        middle = 1 << (bits - 1)
        shape = linear.shape("weight_zero_point")
        if linear.files[f"{linear.name}.weight_zero_point"].dtype == torch.int32:
            packed = linear.read("weight_zero_point", [torch.int32], (-(-n * bits // 32), groups))
            return nibbles(packed.T, bits).T[:n].contiguous()
        allowed = [(n, groups)] if groups > 1 else [(n, 1), (n,), (1,), ()]
        signed = linear.read("weight_zero_point", [torch.int8], *allowed).reshape(-1, groups).expand(n, -1)
        signed = signed.to(torch.int16)
        if bool(((signed < -middle) | (signed >= middle)).any()):
            linear.fail(f"weight_zero_point {list(shape)} has values outside {bits} bits")
        return (signed + middle).to(torch.uint8)

    def _check_shape(self, linear: StoredLinear, group: int) -> None:
        if linear.has("weight_shape"):
            said = linear.read("weight_shape", [torch.int32, torch.int64], (2,)).tolist()
            if said != [linear.n, linear.k]:
                linear.fail(f"weight_shape says {said}, the model needs {[linear.n, linear.k]}")
        if linear.has("weight_g_idx"):
            order = linear.read("weight_g_idx", [torch.int32, torch.int64], (linear.k,))
            if not bool((order == torch.arange(linear.k, device=order.device) // group).all()):
                linear.fail("weight_g_idx is not in the order of the inputs (actorder='group'), which is not read")


class Float8Format:
    """`quant_method: fp8`: float8_e4m3fn weights with a scale per block, or one scale."""

    label = "fp8"
    marker = "weight_scale_inv"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: `quantization_config`. Raises `ModelLoadError` for other variants, by name."""
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise _refuse(f"fp8 with activation_scheme {config['activation_scheme']!r} (stored activation scales).")
        if str(config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise _refuse(f"fp8 with fmt {config['fmt']!r}; e4m3 is read.")
        size = config.get("weight_block_size")
        self._block = None if size is None else _block(size)
        self._dense = tuple(map(str, config.get("modules_to_not_convert") or ()))

    def parts(self) -> tuple[str, ...]:
        return "weight", "weight_scale_inv"

    def is_dense(self, module: str) -> bool:
        return listed(module, self._dense)

    def rows(self, linear: StoredLinear) -> PackedRows:
        return float8_rows(linear, "weight_scale_inv", self._block)


def float8_rows(linear: StoredLinear, scale_name: str, block: tuple[int, int] | None) -> PackedRows:
    """block: rows and columns that share a scale; None for one scale per row, or for all."""
    n, k = linear.n, linear.k
    if block is None:
        group = k
        scales = linear.scales(scale_name, (n, 1), (n,), (1,), (1, 1), ()).reshape(-1, 1).expand(n, -1)
    else:
        height, group = block[0], min(block[1], k)
        if k % group:
            linear.fail(f"{k} inputs do not fit blocks of {group}")
        scales = linear.scales(scale_name, (-(-n // height), k // group)).repeat_interleave(height, 0)[:n]
    packing: Packing = linear.packing(Scheme.FLOAT8, 8, k, group, scale_bytes(scales))
    stored = linear.read("weight", [torch.float8_e4m3fn], (n, k))
    if bool(((stored.view(torch.uint8) & 127) == 127).any()):
        linear.fail("weight has values that are not finite")
    return PackedRows(packing, lambda start, end: packing.pack(stored[start:end], scales[start:end]))


def _block(size: Any) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2 or any(type(x) is not int or x < 1 for x in size):
        raise _refuse(f"blocks of {size!r}; two whole numbers are expected.")
    return size[0], size[1]
