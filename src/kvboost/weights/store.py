"""Where streamed layers wait in RAM, each as one flat run of bytes. Files: see `disk.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from kvboost.cache.pages import HUGE_PAGE_BYTES, zeroed_buffer

log = logging.getLogger("kvboost")

PROBE_BYTES = 256 << 20
"""Copied to measure a bus."""

TOUCHING_THREADS = 8
"""Memory is taken by that many threads: one thread zeroes pages at about 3 GB/s, 64 GiB would take 20 s."""


class HostArena:
    """Layers in RAM: one anonymous mapping in huge pages; for a GPU it is pinned as a whole.

    torch's own pinned allocator rounds every block up to a power of two, and mapped files cannot be pinned.
    """

    def __init__(self, sizes: Sequence[int], *, pin: bool = False) -> None:
        self._offsets = [0]
        for size in sizes:
            self._offsets.append(self._offsets[-1] + size)
        self._memory = zeroed_buffer(self._offsets[-1])
        self.pinned = pin and self._pin()

    def layer(self, index: int) -> Tensor:
        """The bytes of a layer, to be written before and read after."""
        return self._memory[self._offsets[index] : self._offsets[index + 1]]

    def read_into(self, layer: int, out: Tensor) -> None:
        source = self.layer(layer)
        out[: source.numel()].copy_(source)

    def on_gpu(self, layer: int, device: torch.device) -> Tensor:
        """The bytes of a layer as a tensor of `device`: the GPU reads them where they are, over the bus. Needs `pinned`."""
        view = _Exposed(self.layer(layer))
        return torch.as_tensor(view, device=device)

    def close(self) -> None:
        if self.pinned:
            self.pinned = False
            torch.cuda.synchronize()  # copies from it may be under way
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = self._memory[:0]

    def _pin(self) -> bool:
        """Lock the pages, so that the GPU copies from them by itself. What cannot be pinned is copied at half the speed."""
        touch(self._memory)
        status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        if int(status) == 0:
            return True
        log.warning(
            "%.1f GiB of RAM could not be pinned (CUDA error %s): streaming will be slower, and without CUDA graphs. "
            "Raise the limit of locked memory (ulimit -l), or lower weights_budget_gib.",
            self._memory.nbytes / 2**30,
            int(status),
        )
        return False


def touch(memory: Tensor) -> None:
    """Have the system give all pages of `memory` now, with several threads."""
    step = -(-memory.numel() // TOUCHING_THREADS // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES or memory.numel()
    pieces = [memory[at : at + step] for at in range(0, memory.numel(), max(1, step))]
    with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
        list(pool.map(lambda piece: piece[::4096].zero_(), pieces))


class _Exposed:
    """Pinned bytes as an object of the CUDA array interface: under unified addressing their address is the GPU's too."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 2,
        }  # fmt: skip


def readable_in_place(device: torch.device) -> bool:
    """Whether the GPU reads pinned RAM where it is; tried on a page."""
    arena = HostArena([4096], pin=True)
    if not arena.pinned:
        return False
    try:
        arena.layer(0).fill_(7)
        seen = arena.on_gpu(0, device)
        return seen.data_ptr() == arena.layer(0).data_ptr() and int(seen.int().sum()) == 7 * 4096
    except RuntimeError:
        return False
    finally:
        arena.close()


def measure_bus(device: torch.device) -> float:
    """Bytes per second that the copy engine brings from pinned RAM to a GPU, or that are copied within RAM."""
    on_gpu = device.type == "cuda"
    arena = HostArena([PROBE_BYTES], pin=on_gpu)
    target: Tensor | None = None
    try:
        target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        times = []
        for _ in range(4):  # the first one wakes the bus, or takes the memory
            began = time.perf_counter()
            target.copy_(arena.layer(0), non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return PROBE_BYTES / min(times)
    finally:
        arena.close()
        target = None
        if on_gpu:
            torch.cuda.empty_cache()
