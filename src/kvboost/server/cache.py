"""/v1/cache: what the KV cache holds, filling it ahead of time, and emptying it. Never shows text."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvboost.server.answers import Json, WholeAnswer
from kvboost.server.errors import ApiError
from kvboost.server.generation import Generation
from kvboost.server.mailbox import Snapshot
from kvboost.server.prompts import chat_size, plain_messages, prompt_size
from kvboost.server.sampling import cache_salt
from kvboost.server.schema import ERRORS, WarmRequest
from kvboost.server.state import ServerState, server_state

router = APIRouter()
State = Annotated[ServerState, Depends(server_state)]

NUM_TOP_PREFIXES = 20


@router.get("/v1/cache", tags=["cache"])
async def cache(request: Request, state: State) -> Response:
    """Hit rate, what each tier holds, and the prefixes that saved the most tokens."""
    now = state.mailbox.snapshot
    queries = now.prefix_queries_tokens
    answer: dict[str, Any] = {
        "object": "cache",
        "block_size": state.kv.config.block_size,
        "prefix_queries_tokens": queries,
        "prefix_hits_tokens": now.prefix_hits_tokens,
        "hit_rate": round(now.prefix_hits_tokens / queries, 6) if queries else 0.0,
        "tiers": tiers(state, now),
    }
    if not _is_tenant(request):
        top = state.prefixes.top(NUM_TOP_PREFIXES)
        present = await state.ask(lambda scheduler: [bool(scheduler.pool.find([key], 1)) for key, _ in top])
        answer["top_prefixes"] = [{**facts, "present": here} for (_, facts), here in zip(top, present, strict=True)]
    return Json(answer)


def tiers(state: ServerState, now: Snapshot) -> list[dict[str, Any]]:
    """Occupancy of every memory that holds KV."""
    slab = state.kv.built.layout.slab_bytes
    return [
        {
            "name": "device",
            "blocks_total": now.blocks_total,
            "blocks_referenced": now.blocks_referenced,
            "blocks_cached": now.blocks_cached,
            "blocks_pinned": now.blocks_pinned,
            "bytes_total": now.blocks_total * slab,
            "bytes_cached": now.blocks_cached * slab,
        }
    ]


@router.post("/v1/cache/warm", responses=ERRORS, tags=["cache"])
async def warm(body: WarmRequest, request: Request, state: State) -> Response:
    """Compute and keep the KV of a text; with `pin`, until the cache is reset."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give prompt or messages, one of them.", param="prompt", code="invalid_value")
    if body.pin and _is_tenant(request):
        raise ApiError(403, "pin: an API key with its own salt may not pin blocks.", param="pin", code="forbidden")
    salt = cache_salt(request.scope, body.cache_salt)
    prompt: Any = body.prompt if body.messages is None else plain_messages(body.messages)
    size = prompt_size(body.prompt) if body.prompt is not None else chat_size(body.messages or ())
    arrival_s = time.perf_counter()
    wanted = await state.prepare(size, lambda: state.kv.warm_request(prompt, pin=body.pin, cache_salt=salt))
    if wanted is None:
        return Json({"tokens": 0, "cached_tokens": 0, "pinned_blocks": 0})
    wanted.arrival_s = arrival_s

    async def render(_: Generation) -> dict[str, Any]:
        done = await state.ask(lambda _: state.kv.warm_result(wanted))
        return {"tokens": done.tokens, "cached_tokens": done.cached_tokens, "pinned_blocks": done.pinned_blocks}

    return WholeAnswer(state, [[wanted]], render)


@router.post("/v1/cache/reset", responses=ERRORS, tags=["cache"])
async def reset(request: Request, state: State) -> Response:
    """Forget all stored KV, pinned too. Running requests keep what they hold."""
    if _is_tenant(request):
        raise ApiError(403, "An API key with its own salt may not empty the cache of others.", code="forbidden")
    blocks = await state.ask(lambda scheduler: scheduler.forget_cached())
    state.prefixes.clear()
    return Json({"forgotten_blocks": blocks})


def _is_tenant(request: Request) -> bool:
    key = request.scope.get("kvboost.key")
    return key is not None and key.salt is not None
