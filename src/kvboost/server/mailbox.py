"""From the engine's thread to the event loop: outputs of a whole step travel in one wake-up. Knows no torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from kvboost.engine.engine import Engine
from kvboost.engine.outputs import RequestOutput
from kvboost.engine.scheduler import Scheduler
from kvboost.weights.plan import StreamStats

log = logging.getLogger("kvboost.server")

Receiver = Callable[[RequestOutput], None]


class Snapshot(NamedTuple):
    """The engine after its last turn: what gauges show without waiting for the step under way. Counts since the start."""

    running: int
    waiting: int
    blocks_total: int
    blocks_referenced: int
    blocks_cached: int
    blocks_pinned: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    finished: int


def snapshot(scheduler: Scheduler) -> Snapshot:
    """Call in the engine's thread. Some integers: its cost does not grow with the number of requests."""
    pool, counters = scheduler.pool, scheduler.counters
    return Snapshot(
        len(scheduler.running), len(scheduler.waiting), pool.num_blocks, pool.num_referenced, pool.num_cached,
        scheduler.num_pinned if scheduler.pinned else 0, counters.prefix_queries, counters.prefix_hits,
        counters.computed_tokens, counters.output_tokens, counters.preemptions, counters.steps,
        counters.finished_requests,
    )  # fmt: skip


class Mailbox:
    """Collects what sinks get during a turn of the engine, and hands it to the event loop when the turn is over.

    Made on the event loop. Receivers run there, in the order of the outputs.
    """

    def __init__(self, engine: Engine) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[Receiver, RequestOutput]] = []
        self.snapshot: Snapshot = engine.call(snapshot)
        self._engine = engine
        self._unlisten = engine.listen(self._turn_over)

    @property
    def weights(self) -> StreamStats | None:
        """What streaming has done so far; None when all weights are resident."""
        return self._engine.weights

    def sink(self, receiver: Receiver) -> Receiver:
        """What to set as a request's sink, so that `receiver` gets its outputs on the event loop."""

        def put(output: RequestOutput) -> None:
            self._pending.append((receiver, output))

        return put

    def close(self) -> None:
        self._unlisten()

    def _turn_over(self, scheduler: Scheduler) -> None:
        self.snapshot = snapshot(scheduler)
        if self._pending:
            batch, self._pending = self._pending, []
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                pass


def _deliver(batch: list[tuple[Receiver, RequestOutput]]) -> None:
    for receiver, output in batch:
        try:
            receiver(output)
        except Exception:  # one client's trouble must not cost the others their tokens
            log.exception("the receiver of an output failed")
