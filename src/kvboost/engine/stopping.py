"""When a request ends. Policy: plain Python, no torch."""

from __future__ import annotations

from kvboost.engine.request import Request


def ends_after(request: Request, token: int, matched_stop: str | None) -> tuple[str, int | str | None] | None:
    """(finish_reason, stop_reason) when `token`, already appended, is the last one; None to go on.

    Order as in vLLM: EOS and stop tokens first, then stop strings, then lengths.
    """
    params = request.params
    # Under a grammar, a stop token before min_tokens means that nothing else was allowed.
    if token in request.stop_ids and (request.num_output >= params.min_tokens or request.grammar is not None):
        return "stop", token if token in params.stop_token_ids else None
    if matched_stop is not None:
        return "stop", matched_stop
    if len(request.tokens) >= request.max_total_tokens:
        return "length", None
    if request.should_stop is not None and request.should_stop(request.tokens):
        return "stop", None
    return None
