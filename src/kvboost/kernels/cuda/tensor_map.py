"""Descriptions of tensors for the copy engine that GPUs have from compute capability 9.0 on."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from kvboost.kernels.cuda.driver import driver, require

UINT16, NO_INTERLEAVE, SWIZZLE_128B, PROMOTION_L2_256B, FILL_ZEROS = 1, 0, 3, 3, 0
"""Of CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill."""

ALIGNMENT = 64
"""Bytes: where the driver wants a map to begin."""

ADDRESS_ALIGNMENT = 16
"""Bytes: of a tensor's address and strides."""


class TensorMap(ctypes.Structure):
    """CUtensorMap, as a kernel takes it for a parameter."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def fits(tensor: Tensor) -> bool:
    """Whether the copy engine can read it."""
    steps = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and not any(at % ADDRESS_ALIGNMENT for at in (tensor.data_ptr(), *steps))


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> TensorMap:
    """Of a tensor of 16-bit numbers for which `fits` holds, and the box of it that is brought at a time, its last side of 64.

    A kernel gives coordinates in the opposite order, the last dimension's first. Raises `CudaUnavailable`.
    """
    return _tensor_map(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), box)


@lru_cache(maxsize=1024)
def _tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, box: tuple[int, ...]
) -> TensorMap:
    room = bytearray(ctypes.sizeof(TensorMap) + ALIGNMENT)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    made = TensorMap.from_buffer(room, -begin % ALIGNMENT)
    rank = len(shape)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), UINT16, rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*(stride * size for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*(1 for _ in shape)),
        NO_INTERLEAVE, SWIZZLE_128B, PROMOTION_L2_256B, FILL_ZEROS,
    )  # fmt: skip
    require(status, f"describing a tensor {shape} for the copy engine")
    return made
