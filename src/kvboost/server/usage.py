"""`usage` as OpenAI has it, with where the prompt's KV came from beside it. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvboost.engine.request import Request
from kvboost.server.generation import Generation


def usage(generation: Generation) -> dict[str, Any]:
    """Token counts of a request. A prompt counts once, however many continuations it has."""
    firsts = [c.request for c in generation.continuations if id(c.request) in generation.firsts]
    prompt = sum(r.num_prompt for r in firsts)
    output = sum(c.usage.output_tokens for c in generation.continuations)
    cached = cached_by_source(firsts)
    total = sum(cached.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": total},
        "kvboost": {"cached": cached, "computed": prompt - total},
    }


def cached_by_source(requests: Iterable[Request]) -> dict[str, int]:
    """Tokens found, by the memory they were found in."""
    found: dict[str, int] = {}
    for request in requests:
        for source, tokens in request.cached_by_source.items():
            found[source] = found.get(source, 0) + tokens
    return found


def timing(generation: Generation) -> dict[str, Any]:
    """Where the time of the first continuation went, in milliseconds, and its prompt as runs of (source, tokens).

    ttft_ms = queue_ms + lookup_ms + load_ms + compute_ms.
    """
    request = generation.continuations[0].request
    completion = generation.continuations[0].completion()
    arrival = request.arrival_s
    first = request.first_token_s if request.first_token_s is not None else arrival
    scheduled = request.first_scheduled_s if request.first_scheduled_s is not None else first
    queue = max(0.0, scheduled - arrival - request.lookup_s)
    compute = max(0.0, first - arrival - queue - request.lookup_s - request.load_s)
    return {
        "ttft_ms": _ms(first - arrival),
        "queue_ms": _ms(queue),
        "lookup_ms": _ms(request.lookup_s),
        "load_ms": _ms(request.load_s),
        "compute_ms": _ms(compute),
        "total_ms": round(completion.total_ms, 3),
        "blocks": [list(run) for run in request.prompt_runs],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
