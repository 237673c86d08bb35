"""Turns the engine's outputs of one prompt's `n` continuations into results. Knows no torch."""

from __future__ import annotations

from kvboost.api.results import Completion, GenerationResult, TokenLogprobs, Usage
from kvboost.engine.outputs import RequestOutput
from kvboost.engine.request import Request


class Continuation:
    """What came so far for one request. `pieces` are the (text, tokens) of its outputs."""

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self._token_ids: list[int] = []
        self.pieces: list[tuple[str, list[int]]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._first_s: float | None = None
        self._last_s = 0.0
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, output: RequestOutput) -> None:
        self._token_ids += output.token_ids
        self.pieces.append((output.text, output.token_ids))
        self._logprobs += output.logprobs or ()
        if output.token_ids:
            self._first_s = self._first_s or output.time_s
            self._last_s = output.time_s
        self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason

    @property
    def usage(self) -> Usage:
        return Usage(self.request.num_prompt, dict(self.request.cached_by_source), len(self._token_ids))

    def completion(self) -> Completion:
        request, count = self.request, len(self._token_ids)
        first = self._first_s if self._first_s is not None else request.arrival_s
        last = self._last_s or first
        wants_logprobs = request.params.logprobs is not None
        return Completion(
            index=self.index,
            text="".join(text for text, _ in self.pieces),
            token_ids=self._token_ids,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self._stop_reason,
            logprobs=self._logprobs if wants_logprobs else None,
            cumulative_logprob=(
                sum(row[token].logprob for row, token in zip(self._logprobs, self._token_ids, strict=True))
                if wants_logprobs
                else None
            ),
            usage=self.usage,
            ttft_ms=(first - request.arrival_s) * 1e3,
            tpot_ms=(last - first) * 1e3 / (count - 1) if count > 1 else 0.0,
            total_ms=(last - request.arrival_s) * 1e3,
            queue_ms=((request.first_scheduled_s or first) - request.arrival_s) * 1e3,
            num_preemptions=request.num_preemptions,
        )


def result_of(prompt: str | None, continuations: list[Continuation]) -> GenerationResult:
    """The finished answer to one prompt."""
    first = continuations[0].request
    return GenerationResult(
        prompt=prompt,
        prompt_token_ids=list(first.prompt_ids),
        outputs=[c.completion() for c in continuations],
        prompt_logprobs=first.prompt_logprobs,
    )
