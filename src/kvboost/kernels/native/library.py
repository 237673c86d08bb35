"""Opens the compiled kernels and declares their C interface."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from kvboost.kernels.native.build import NativeUnavailable, library

DTYPES = (torch.float32, torch.bfloat16)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "kvb_rms_norm": [_int, _pointer, _long, _pointer, _pointer, _long, _long, _int, _int, _float, _float, _int],
    "kvb_add_rms_norm": [_int, *[_pointer] * 5, _long, _int, _float, _float, _int],
    "kvb_rotate_and_write": [_int, _pointer, _long, _long, *[_int] * 5, *[_pointer] * 6, _long, _int],
    "kvb_write": [_int, *[_pointer, _long, _long] * 2, _long, *[_int] * 4, *[_pointer] * 4, _long],
    "kvb_gate": [_int, _pointer, _pointer, _long, _int, _int, _int],
    "kvb_attention": [_int, _pointer, _long, _pointer, _pointer, _long, _pointer, _long, *[_int] * 5, _pointer, _int,
                      _pointer, _float, _float, _int, _pointer, _int],
    "kvb_linear": [_int, _pointer, _long, _pointer, _pointer, _long, _int],
    "kvb_unpack": [_int, _pointer, _pointer, _long, _long, _pointer, _pointer, _long, _int],
    "kvb_layer": [_int, _pointer, _pointer, _pointer, _pointer, _int],
}  # fmt: skip


class PackedRows(ctypes.Structure):
    """`Packing` of packed.h; zeros stand for a dense weight."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("scheme", "bits", "group", "scale_bytes")),
        *((name, _long) for name in ("high_at", "scales_at", "beside_at", "row_bytes")),
    )


class Weight(ctypes.Structure):
    """`Weight` of linear_call.h."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("n", _long), ("packing", PackedRows))


class Weights(ctypes.Structure):
    """`Weights` of linear_call.h."""

    _fields_ = (("pieces", Weight * 3), ("count", _long), ("n", _long), ("k", _long))


class NormWeight(ctypes.Structure):
    """`NormWeight` of layer.h."""

    _fields_ = (("weight", _pointer), ("eps", _float), ("offset", _float), ("width", ctypes.c_int32))


class Layer(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "q_heads", "kv_heads", "dim", "v_dim", "activation", "window")),
        ("scaling", _float), ("softcap", _float), ("sinks", _pointer),
        *((name, NormWeight) for name in ("before", "between", "q_norm", "k_norm")),
        *((name, Weights) for name in ("qkv", "out", "gate_up", "down")),
    )  # fmt: skip


class Step(ctypes.Structure):
    """`Step` of layer.h."""

    _fields_ = (
        ("rows", _long), ("block_stride", _long),
        *((name, ctypes.c_int32) for name in ("block_size", "num_spans", "rotary")),
        *((name, _pointer) for name in ("spans", "tables", "slot_block", "slot_offset", "cos", "sin", "keys", "values")),
    )  # fmt: skip


_lock = threading.Lock()
_loaded: ctypes.CDLL | NativeUnavailable | None = None


def load() -> ctypes.CDLL:
    """The library, compiled and opened once per process. Raises `NativeUnavailable`, the same each time."""
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = _open()
            except NativeUnavailable as error:
                _loaded = error
        if isinstance(_loaded, NativeUnavailable):
            raise _loaded
        return _loaded


def _open() -> ctypes.CDLL:
    try:
        opened = ctypes.CDLL(str(library()))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels could not be opened: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, None
    opened.kvb_has_amx.restype, opened.kvb_unpack.restype = _int, _long
    opened.kvb_has_vectors.argtypes, opened.kvb_has_vectors.restype = [_int], _int
    return opened


def unavailable() -> str | None:
    """Why the kernels cannot be used here, or None."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None
