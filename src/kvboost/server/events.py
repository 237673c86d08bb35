"""GET /v1/events: the engine's pulse as server-sent events, for the page. Numbers only."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.server.answers import EVENT_STREAM_HEADERS, event
from kvboost.server.cache import tiers
from kvboost.server.errors import ApiError
from kvboost.server.mailbox import Snapshot
from kvboost.server.state import ServerState, server_state

router = APIRouter()

PERIOD_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
"""Proxies close a silent connection after 30 s or more."""

MAX_LISTENERS = 64


@router.get("/v1/events", tags=["server"])
async def events(state: Annotated[ServerState, Depends(server_state)]) -> Response:
    """Once a second, while something changes: requests, tokens per second, the pool and the tiers."""
    if state.num_listeners >= MAX_LISTENERS:
        raise ApiError(429, f"{MAX_LISTENERS} clients listen already.", code="too_many_listeners",
                       headers={"Retry-After": "5"})  # fmt: skip
    return _Pulse(state)


class _Pulse(Response):
    def __init__(self, state: ServerState) -> None:
        super().__init__()
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.num_listeners += 1
        sender = asyncio.ensure_future(self._send(send))
        try:
            while (await receive())["type"] != "http.disconnect" and not sender.done():
                pass
        finally:
            sender.cancel()
            self._state.num_listeners -= 1

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        before, shown, at = self._state.mailbox.snapshot, None, time.monotonic()
        told = at
        while self._state.ready:
            now, clock = self._state.mailbox.snapshot, time.monotonic()
            facts = pulse(self._state, before, now, clock - at)
            before, at = now, clock
            if facts != shown:
                await send({"type": "http.response.body", "body": event(facts), "more_body": True})
                shown, told = facts, clock
            elif clock - told > KEEP_ALIVE_SECONDS:
                await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})
                told = clock
            await asyncio.sleep(PERIOD_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def pulse(state: ServerState, before: Snapshot, now: Snapshot, seconds: float) -> dict[str, Any]:
    """What happened between two snapshots, and how things stand."""

    def rate(count: int) -> float:
        return round(count / seconds, 1) if seconds > 0 else 0.0

    queries = now.prefix_queries_tokens
    output = now.output_tokens - before.output_tokens
    return {
        "running": now.running,
        "waiting": now.waiting,
        "tokens_per_second": rate(output),
        "computed_tokens_per_second": rate(now.computed_tokens - before.computed_tokens),
        "pool": {
            "total": now.blocks_total,
            "referenced": now.blocks_referenced,
            "cached": now.blocks_cached,
            "pinned": now.blocks_pinned,
        },
        "tiers": tiers(state, now),
        "hit_rate": round(now.prefix_hits_tokens / queries, 6) if queries else 0.0,
        "prefix_queries_tokens": queries,
        "prefix_hits_tokens": now.prefix_hits_tokens,
        "requests_finished": now.finished,
        "preemptions": now.preemptions,
    }
