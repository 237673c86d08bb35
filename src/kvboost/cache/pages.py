"""Large CPU buffers in huge pages: KV is gathered and weights are read from all over them, 4 KiB pages cost TLB misses."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def zeroed_buffer(size: int) -> Tensor:
    """`size` bytes of zeros, uint8, beginning at a huge page; memory is taken when it is first touched.

    Where the system has no huge pages to give, ordinary ones serve.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without them
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + size]


def return_freed_memory() -> None:
    """Ask the C library to hand freed memory back to the system; what loading let go stays in its heap otherwise
    (60 MiB of 380 for Gemma 3 270M)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
