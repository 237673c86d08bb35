"""How layers come into the slots of a GPU: by its copy engine from pinned RAM, or from a drive through a pinned ring."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvboost.weights.feeds import Desk, Job, Read, ThreadFeed
from kvboost.weights.store import HostArena, readable_in_place

RING_BUFFERS = 2
"""Of pinned RAM between a drive and a GPU: one is read into while the other is copied from."""


class CopyFeed:
    """A GPU's copy engine reads pinned RAM: one stream of copies beside the one that computes, ordered by events.

    The host never waits, and a sweep can be captured in a CUDA graph: `settle` before the capture, so that nothing of
    before is waited for inside, and again at its end, where all that was begun inside must be joined.

    Layers are copied from where the GPU itself sees them: torch does not know that the arena is pinned, and refuses to
    capture a copy from what it takes for ordinary memory.
    """

    def __init__(self, arena: HostArena, slots: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self.stall_s, self.loaded_bytes = 0.0, 0
        self._slots, self._sizes = slots, tuple(sizes)
        self._device = slots[0].device
        self._seen_by_gpu = arena.pinned and readable_in_place(self._device)
        places = range(len(self._sizes))
        self._sources = [arena.on_gpu(i, self._device) if self._seen_by_gpu else arena.layer(i) for i in places]
        self._stream = torch.cuda.Stream(self._device)
        self._ready: list[torch.cuda.Event | None] = [None] * len(slots)
        self._free: list[torch.cuda.Event | None] = [None] * len(slots)
        self.close = weakref.finalize(self, arena.close)

    @property
    def capturable(self) -> bool:
        return self._seen_by_gpu

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def load(self, layer: int, slot: int) -> None:
        size = self._sizes[layer]
        self.loaded_bytes += size
        self._stream.wait_event(self._free[slot] or self._here())
        with torch.cuda.stream(self._stream):
            self._copy(self._slots[slot][:size], self._sources[layer])
        self._ready[slot] = self._stream.record_event()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """On the copying stream."""
        target.copy_(source, non_blocking=True)

    def wait(self, layer: int, slot: int) -> None:
        ready = self._ready[slot]
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def used(self, slot: int) -> None:
        self._free[slot] = self._here()

    def settle(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for event in (*self._ready, *self._free):
            if event is not None:
                current.wait_event(event)
        self.forget()

    def all_used(self) -> None:
        here = self._here()
        self._free = [here for _ in self._slots]
        self._ready = [ready or here for ready in self._ready]  # for layers that are run on another stream

    def forget(self) -> None:
        self._ready, self._free = [None] * len(self._slots), [None] * len(self._slots)

    def _here(self) -> torch.cuda.Event:
        """All that has been given to the computing stream so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event


class RingFeed(ThreadFeed):
    """From a drive to a GPU: a thread reads into a small pinned ring and queues the copies, those of layers in RAM too."""

    def __init__(
        self,
        read: Read,
        slots: Sequence[Tensor],
        sizes: Sequence[int],
        close: Callable[[], None],
        in_ram: Mapping[int, Tensor],
    ) -> None:
        """in_ram: pinned bytes of the layers that need not be read."""
        self.stall_s, self.loaded_bytes = 0.0, 0
        self._sizes = tuple(sizes)
        self._desk = Desk(len(slots))
        self._device = slots[0].device
        self._free: list[torch.cuda.Event | None] = [None] * len(slots)
        ring = HostArena([max(sizes)] * RING_BUFFERS, pin=True)

        def close_all() -> None:
            ring.close()
            close()

        self._begin(_Ring(read, slots, self._sizes, ring, in_ram).fill, close_all)

    def _ticket(self, slot: int) -> torch.cuda.Event | None:
        return self._free[slot]

    def _arrived(self, slot: int, receipt: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(receipt)

    def used(self, slot: int) -> None:
        self._free[slot] = torch.cuda.current_stream(self._device).record_event()


class _Ring:
    """What the thread of a `RingFeed` does."""

    def __init__(
        self, read: Read, slots: Sequence[Tensor], sizes: Sequence[int], ring: HostArena, in_ram: Mapping[int, Tensor]
    ) -> None:
        self._read, self._slots, self._sizes, self._in_ram = read, slots, sizes, in_ram
        self._stream = torch.cuda.Stream(slots[0].device)
        self._buffers = deque((ring.layer(i), torch.cuda.Event()) for i in range(RING_BUFFERS))

    def fill(self, job: Job) -> None:
        source, copied = self._in_ram.get(job.layer), None
        if source is None:
            source, copied = self._buffers[0]
            self._buffers.rotate(-1)
            copied.synchronize()  # what it held before; only this thread waits
            self._read(job.layer, source)
        if job.ticket is not None:
            self._stream.wait_event(job.ticket)
        size = self._sizes[job.layer]
        with torch.cuda.stream(self._stream):
            self._slots[job.slot][:size].copy_(source[:size], non_blocking=True)
        if copied is not None:
            copied.record(self._stream)
        job.receipt = self._stream.record_event()
