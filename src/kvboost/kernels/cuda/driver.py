"""Loads machine code through CUDA's driver and launches its kernels on PyTorch's stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvboost.kernels.cuda.compiler import CudaUnavailable
from kvboost.kernels.triton.support import starts_early

PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: start when the kernel before lets go, and wait for what it stores
inside (`wait_for_kernel_before` in machine.h)."""

MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, padding, and 64 bytes of value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


@lru_cache
def driver() -> ctypes.CDLL:
    """CUDA's driver. Raises `CudaUnavailable`."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"CUDA's driver could not be opened: {error}") from error


def require(status: int, what: str) -> None:
    """Raise `CudaUnavailable` for an error of the driver."""
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise CudaUnavailable(f"{what} failed with {(name.value or b'an unknown error').decode()}")


_thread = threading.local()


def _bind_context() -> None:
    """Once a thread: the driver's calls need the context that PyTorch's make current."""
    if getattr(_thread, "bound", False):
        return
    context = ctypes.c_void_p()
    driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        torch.cuda.mem_get_info()
    _thread.bound = True


def address_of(tensor: Tensor | None) -> ctypes.c_void_p:
    """As an argument of a launch; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class Kernel:
    """One kernel of loaded machine code, for the device that is current when it is made.

    most_shared_bytes: of shared memory that a launch may ask for.
    """

    def __init__(self, code: bytes, name: str, threads: int, most_shared_bytes: int) -> None:
        self._cuda = driver()
        _bind_context()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        require(self._cuda.cuModuleLoadData(ctypes.byref(module), code), "loading a kernel")
        require(self._cuda.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"finding {name}")
        require(
            self._cuda.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE, most_shared_bytes),
            f"asking for {most_shared_bytes} bytes of shared memory",
        )
        self._threads = threads
        self._early = _Attribute(id=PROGRAMMATIC_SERIALIZATION)
        self._early.value[0] = 1
        self._starts_early = starts_early(torch.device("cuda", torch.cuda.current_device()))

    def launch(self, grid: Sequence[int], shared_bytes: int, arguments: Sequence[Any]) -> None:
        """On the current stream of the current device; `arguments` are ctypes values as the kernel declares them. grid: of up to
        3 dimensions.

        On newer GPUs the kernel may start before the one before has ended: what it reads before it waits must not have been
        written by that one.
        """
        _bind_context()
        config = _Config(
            grid=(*grid, 1, 1)[:3], block=(self._threads, 1, 1), shared_bytes=shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=ctypes.pointer(self._early), num_attributes=int(self._starts_early),
        )  # fmt: skip
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        require(self._cuda.cuLaunchKernelEx(ctypes.byref(config), self._function, addresses, None), "a launch")
