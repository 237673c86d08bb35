"""The requests of one HTTP request on their way through the engine, seen from the event loop.

No thread waits for them: the mailbox hands outputs over, a timer holds the deadline, and whoever waits is one future.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvboost.api.collect import Continuation
from kvboost.engine.outputs import RequestOutput
from kvboost.engine.request import Request
from kvboost.errors import EngineClosed, KVBoostError
from kvboost.server.errors import ApiError

if TYPE_CHECKING:
    from kvboost.server.state import ServerState

Event = tuple[int, RequestOutput]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(KVBoostError):
    """The client closed its connection: nobody is left to be told."""


class Generation:
    """Use as `async with`: entering submits, leaving ends what still runs and returns its blocks.

    prompts: for each prompt its `n` requests, from `KVBoost.make_requests`. `continuations` numbers them all in order:
    the `index` of events and choices. Entering raises `EngineBusy`; `next` raises the error of the first request that
    failed, `ApiError` 504 at the deadline, or `ClientGone`.
    """

    def __init__(self, state: ServerState, prompts: Sequence[Sequence[Request]], receive: Receive | None) -> None:
        self.state = state
        requests = [r for group in prompts for r in group]
        self.continuations = [Continuation(r, i) for i, r in enumerate(requests)]
        self.firsts = frozenset(id(group[0]) for group in prompts)
        self._receive = receive
        self._events: list[Event] = []
        self._open = len(requests)
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_s: list[float | None] = [None] * len(requests)
        self._tasks: list[asyncio.Task[None] | asyncio.TimerHandle] = []

    async def __aenter__(self) -> Generation:
        for c in self.continuations:
            c.request.sink = self.state.mailbox.sink(partial(self._arrived, c.index))
        self.state.kv.engine.submit([c.request for c in self.continuations])
        loop, limit = asyncio.get_running_loop(), self.state.config.request_timeout
        late = ApiError(504, f"The request took longer than {limit:g} s (--request-timeout).", code="request_timeout")
        self._tasks = [loop.call_later(limit, self.fail, late)]
        if self._receive is not None:
            self._tasks.append(loop.create_task(self._watch(self._receive)))
        self.state.live.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.state.live.discard(self)
        for task in self._tasks:
            task.cancel()
        for c in self.continuations:
            if c.finish_reason is None:
                self.state.kv.engine.abort(c.request)
        self.state.metrics.ended(self)
        if self.state.tracing is not None:
            self.state.tracing.ended(self)

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended and `next` has told so."""
        return not self._open and not self._events

    async def next(self) -> list[Event]:
        """What came since the last call, at least one event, in the order it was made."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    async def finish(self) -> None:
        """Wait for the end of all continuations."""
        while not self.finished:
            await self.next()

    def fail(self, error: BaseException) -> None:
        """Have `next` raise `error` once it has told what came before."""
        self._failure = self._failure or error
        self._wake()

    def _arrived(self, index: int, output: RequestOutput) -> None:
        continuation = self.continuations[index]
        if output.error is not None:
            self._open -= 1
            continuation.finish_reason = "error"
            self.fail(output.error)
            return
        if output.finish_reason == "abort":
            # Nobody aborts what is still listened to, except the engine when it closes.
            self.fail(EngineClosed("the engine was closed while this request was running."))
            self._open -= 1
            continuation.add(output)
            return
        continuation.add(output)
        self._open -= output.finish_reason is not None
        if output.token_ids:
            if self._last_s[index] is None and id(continuation.request) in self.firsts:
                self.state.prefixes.note(continuation.request)
            self.state.metrics.tokens(self, continuation, output, self._last_s[index])
            self._last_s[index] = output.time_s
        self._events.append((index, output))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _watch(self, receive: Receive) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())
