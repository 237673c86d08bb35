"""How layers come into slots: what a feed does, and the one for CPUs, a thread. Those for GPUs: see `gpu_feeds.py`.

A feed is told to `load` a layer into a slot at a moment when everything that uses the slot's present layer has been
started, and to `wait` before the layer is used. It does what it was told in order; of two loads of one slot the later
one counts.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Read = Callable[[int, Tensor], None]
"""`read(layer, out)` fills the beginning of `out`, uint8 on the CPU."""


class Feed(Protocol):
    """Fills the slots of one streamer."""

    stall_s: float
    """Seconds for which the host waited for layers."""

    loaded_bytes: int

    @property
    def capturable(self) -> bool:
        """Whether loads and waits can be part of a CUDA graph."""
        ...

    def load(self, layer: int, slot: int) -> None: ...

    def wait(self, layer: int, slot: int) -> None:
        """Have `layer` in `slot` for whatever is computed next. Raises `ModelLoadError` when it cannot be read."""
        ...

    def used(self, slot: int) -> None:
        """All that uses the slot's present layer has been started."""
        ...

    def settle(self) -> None:
        """Have all that was loaded there for whatever is computed next, and need no event of before."""
        ...

    def all_used(self) -> None:
        """`used` of every slot: a CUDA graph has been replayed over them."""
        ...

    def forget(self) -> None:
        """Nothing that was loaded counts any more; what is loaded next overwrites it."""
        ...

    @property
    def capturing(self) -> bool:
        """Whether what is done now becomes part of a CUDA graph."""
        ...


class ThreadFeed:
    """A thread that reads from a store into slots in RAM."""

    capturable = False
    capturing = False

    def __init__(self, read: Read, slots: Sequence[Tensor], sizes: Sequence[int], close: Callable[[], None]) -> None:
        """close: lets go of what `read` reads from."""
        self.stall_s, self.loaded_bytes = 0.0, 0
        self._sizes = tuple(sizes)
        self._desk = Desk(len(slots))
        self._begin(lambda job: read(job.layer, slots[job.slot]), close)

    def _begin(self, fill: Callable[[Job], None], close: Callable[[], None]) -> None:
        thread = threading.Thread(target=_work, args=(self._desk, fill), name="kvboost-stream", daemon=True)
        thread.start()
        # The thread knows the desk and not the feed: a model that is let go takes its feed along, and this ends it.
        self.close = weakref.finalize(self, _end, self._desk, thread, close)

    def load(self, layer: int, slot: int) -> None:
        self.loaded_bytes += self._sizes[layer]
        self._desk.put(Job(layer, slot, self._ticket(slot)))

    def _ticket(self, slot: int) -> Any:
        """What the thread must wait for before it fills the slot."""
        return None

    def wait(self, layer: int, slot: int) -> None:
        began = time.perf_counter()
        self._arrived(slot, self._desk.take(layer, slot))
        self.stall_s += time.perf_counter() - began

    def _arrived(self, slot: int, receipt: Any) -> None: ...

    def used(self, slot: int) -> None: ...

    def settle(self) -> None: ...

    def all_used(self) -> None: ...

    def forget(self) -> None: ...


class Job:
    """Fill `slot` with `layer` once `ticket` allows it; `receipt`: what the user of the layer must wait for."""

    def __init__(self, layer: int, slot: int, ticket: Any) -> None:
        self.layer, self.slot, self.ticket = layer, slot, ticket
        self.receipt: Any = None
        self.done = False
        self.error: BaseException | None = None


class Desk:
    """Between the feed and its thread. `present[slot]` is the newest job of a slot."""

    def __init__(self, slots: int) -> None:
        self.changed = threading.Condition()
        self.jobs: deque[Job] = deque()
        self.present: list[Job | None] = [None] * slots
        self.closed = False

    def put(self, job: Job) -> None:
        with self.changed:
            self.jobs.append(job)
            self.present[job.slot] = job
            self.changed.notify_all()

    def take(self, layer: int, slot: int) -> Any:
        job = self.present[slot]
        assert job is not None and job.layer == layer, "waited for a layer that was not loaded"
        with self.changed:
            while not job.done:
                if self.closed:
                    raise RuntimeError("the streamer was closed while a layer was waited for.")
                self.changed.wait()
        if job.error is not None:
            raise job.error
        return job.receipt

    def next(self) -> Job | None:
        """The oldest job that still counts; None at the end."""
        with self.changed:
            while True:
                if self.closed:
                    return None
                if self.jobs:
                    job = self.jobs.popleft()
                    if self.present[job.slot] is job:
                        return job
                    continue
                self.changed.wait()


def _work(desk: Desk, fill: Callable[[Job], None]) -> None:
    while (job := desk.next()) is not None:
        try:
            fill(job)
        except BaseException as error:
            job.error = error
        with desk.changed:
            job.done = True
            desk.changed.notify_all()
        del job  # or it lives, with its layer's receipt, until the next one comes


def _end(desk: Desk, thread: threading.Thread, close: Callable[[], None]) -> None:
    with desk.changed:
        desk.closed = True
        desk.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join()
    close()
