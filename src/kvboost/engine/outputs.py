"""What the engine tells about a request while it runs. Plain data; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Natural-log probability of one token; rank 1 is the most likely token of the vocabulary."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""For one position: the chosen token and the asked-for alternatives, by token id."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. prompt_tokens = cached_tokens + computed_tokens."""

    prompt_tokens: int
    cached_by_source: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_source.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class RequestOutput:
    """What one step did for one request, in the order the tokens were made.

    `text` is what may be shown now: an incomplete character or a possible start of a stop string is held back.
    The last output has `finish_reason` set; `error` is set when the request failed instead.
    Clock values are `time.perf_counter()` seconds.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    time_s: float
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
