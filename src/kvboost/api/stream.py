"""Iterators over a running generation, for threads and for asyncio. Leaving one early ends its requests."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from kvboost.api.collect import Continuation, result_of
from kvboost.api.results import StreamPiece
from kvboost.engine.engine import Engine
from kvboost.engine.outputs import RequestOutput
from kvboost.engine.request import Request
from kvboost.errors import EngineClosed

Event = tuple[int, RequestOutput]


class _Progress:
    """The continuations of one prompt, fed with events; shared by both iterators."""

    def __init__(self, engine: Engine, prompt: str | None, requests: list[Request]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._continuations = [Continuation(r, i) for i, r in enumerate(requests)]

    def connect(self, put: Callable[[Event], object]) -> None:
        for c in self._continuations:
            c.request.sink = partial(_forward, put, c.index)

    def advance(self, event: Event) -> StreamPiece:
        """Raises the request's error, or `EngineClosed` when the engine was closed under it."""
        index, output = event
        if output.error is not None:
            raise output.error
        if output.finish_reason == "abort" and self._engine.closed:
            raise EngineClosed("the engine was closed while this request was running.")
        continuation = self._continuations[index]
        continuation.add(output)
        return StreamPiece(
            text=output.text,
            token_ids=output.token_ids,
            index=index,
            logprobs=output.logprobs,
            usage=continuation.usage,
            result=result_of(self._prompt, self._continuations) if self.finished else None,
        )

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self._continuations)

    def abort(self) -> None:
        for c in self._continuations:
            if c.finish_reason is None:
                self._engine.abort(c.request)


def _forward(put: Callable[[Event], object], index: int, output: RequestOutput) -> None:
    put((index, output))


class TokenStream(Iterator[StreamPiece]):
    """Pieces of one prompt's answer as they are made. Already running when you get it.

    `close()`, leaving the `with` block, or dropping it ends the generation and returns its KV blocks.
    """

    def __init__(self, engine: Engine, prompt: str | None, requests: list[Request]) -> None:
        self._progress = _Progress(engine, prompt, requests)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._progress.connect(self._events.put)
        self._over = True  # until the engine has them: refused requests need no abort
        engine.submit(requests)
        self._over = False

    def __next__(self) -> StreamPiece:
        if self._over:
            raise StopIteration
        try:
            piece = self._progress.advance(self._events.get())
        except BaseException:
            self.close()
            raise
        self._over = piece.finished
        return piece

    def close(self) -> None:
        """End the generation. Idempotent."""
        if not self._over:
            self._over = True
            self._progress.abort()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.close()


async def stream_async(engine: Engine, prompt: str | None, requests: list[Request]) -> AsyncIterator[StreamPiece]:
    """The same for asyncio: cancelling or leaving the loop ends the generation."""
    progress = _Progress(engine, prompt, requests)
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def put(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    progress.connect(put)
    engine.submit(requests)
    try:
        while not progress.finished:
            yield progress.advance(await events.get())
    finally:
        progress.abort()
