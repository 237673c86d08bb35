"""One request on its way through the engine. Policy: plain Python, no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.cache.prefix import token_bytes
from kvboost.engine.outputs import RequestOutput, TokenLogprobs
from kvboost.engine.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """What was asked, how far it is, and which blocks hold its KV.

    `tokens` is the prompt followed by what was generated. The first `num_computed` of them have their KV in `blocks`.
    `keys[i]` is the prefix key of tokens `[i * block_size, (i + 1) * block_size)`.
    Clock values are `time.perf_counter()` seconds; `lookup_s` and `load_s` are what it spent on finding stored KV and on
    waiting for it from below the device, before its first token.
    Invariant while running: `len(blocks) == ceil(num_computed / block_size)` between steps.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    root: bytes
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    processors: tuple[Callable[[Any, Any], Any], ...] = ()
    grammar: Any = None
    should_stop: Callable[[Sequence[int]], bool] | None = None
    detokenizer: Any = None
    sink: Callable[[RequestOutput], None] | None = None
    prefill_only: bool = False
    pin: bool = False
    max_total_tokens: int = 0
    arrival_s: float = 0.0

    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    prompt_bytes: bytes = b""
    """`prompt_ids` as keys are made of them (`cache.prefix.token_bytes`): by whoever makes the request, not in the engine's loop."""
    num_scheduled: int = 0
    """Tokens whose KV is there or being computed."""
    num_computed: int = 0
    """Those whose step is known to have gone well."""
    num_pending: int = 0
    """Tokens being chosen: known to the device only, when the next step is planned meanwhile."""
    blocks: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0
    """Blocks at the beginning of `blocks` that were found, whole, at the last admission."""
    keys: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    cached_by_source: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    lookup_s: float = 0.0
    load_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _greedy_only: bool | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.prompt_bytes = token_bytes(self.prompt_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def remaining(self) -> int:
        """Tokens whose KV no step computes yet, with one that is being chosen unless that must be the last."""
        length = len(self.tokens) + self.num_pending
        return 0 if self.num_pending and length >= self.max_total_tokens else length - self.num_scheduled

    @property
    def prompt_runs(self) -> list[tuple[str, int]]:
        """Where the KV of the prompt came from, in order: runs of (source, tokens); `computed` is one of the sources."""
        runs = list(self.cached_by_source.items())
        computed = len(self.prompt_ids) - (self.cached_tokens or 0)
        return [*runs, ("computed", computed)] if computed else runs

    @property
    def greedy_only(self) -> bool:
        """Its next token is the most likely one, whatever was generated before; nothing else of the logits is asked."""
        plain = self._greedy_only
        if plain is None:
            p = self.params
            plain = self._greedy_only = not (
                not p.greedy or p.logprobs is not None or p.min_tokens or p.logit_bias or p.allowed_token_ids is not None
                or self.bad_word_ids or self.processors or self.grammar is not None or self.should_stop is not None
                or p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
            )  # fmt: skip
        return plain

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def reads_prefix(self) -> bool:
        """Log-probabilities of the prompt need its logits, which stored KV cannot give: such a prompt is computed."""
        return self.params.prompt_logprobs is None
