"""The two forms of an answer, as ASGI responses: whole, or as server-sent events while the tokens are made.

A response owns its generation from submission to the last byte, so that there is one place where a client that goes
away, a deadline or a failed step ends it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.engine.request import Request
from kvboost.errors import KVBoostError
from kvboost.server.errors import ApiError, api_error
from kvboost.server.generation import ClientGone, Event, Generation
from kvboost.server.state import ServerState

log = logging.getLogger("kvboost.server")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back until its buffer is full
]


def dumps(value: Any) -> bytes:
    """Compact JSON as UTF-8. What UTF-8 cannot hold (lone surrogates) is written as JSON escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


class Json(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def error_response(error: BaseException) -> Json:
    """What the client is told about `error`; an unexpected one goes to the log with its traceback."""
    told = api_error(error)
    if told.status >= 500 and not isinstance(error, KVBoostError):
        log.error("unexpected error", exc_info=error)
    return Json(told.body(), status_code=told.status, headers=told.headers)


class StreamWriter(Protocol):
    """Turns events into bytes of the stream. Called on the event loop: it must be quick."""

    def write(self, events: Sequence[Event]) -> bytes:
        """Server-sent events for what came; may be empty."""

    def end(self, generation: Generation) -> bytes:
        """What closes the stream after the last token."""


class _Answer(Response):
    def __init__(self, state: ServerState, prompts: Sequence[Sequence[Request]]) -> None:
        super().__init__()
        self._state = state
        self._prompts = prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Generation(self._state, self._prompts, receive) as generation:
                await self._send(generation, scope, receive, send)
        except ClientGone:
            pass
        except Exception as error:
            await error_response(error)(scope, receive, send)

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(_Answer):
    """Waits for all tokens, then sends what `render(generation)` makes of them as JSON."""

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Sequence[Request]],
        render: Callable[[Generation], dict[str, Any] | Awaitable[dict[str, Any]]],
    ) -> None:
        super().__init__(state, prompts)
        self._render = render

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        await generation.finish()
        content = self._render(generation)
        await Json(content if isinstance(content, dict) else await content)(scope, receive, send)


class StreamAnswer(_Answer):
    """Sends what `writer` makes of the tokens as they come.

    The status waits for the first of them: an error before it has a status of its own. A later one becomes an event
    `{"error": ...}`, which clients raise as an exception.
    """

    def __init__(self, state: ServerState, prompts: Sequence[Sequence[Request]], writer: StreamWriter) -> None:
        super().__init__(state, prompts)
        self._writer = writer

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        events = await generation.next()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        try:
            while True:
                data = self._writer.write(events)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if generation.finished:
                    break
                events = await generation.next()
            data = self._writer.end(generation)
        except ClientGone:
            return
        except Exception as error:
            told = api_error(error)
            if not isinstance(error, (ApiError, KVBoostError)):
                log.error("unexpected error in a stream", exc_info=error)
            data = event(told.body())
        await send({"type": "http.response.body", "body": data, "more_body": False})
