"""What callers get back: texts, tokens, times, and where the KV came from. Plain data; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.engine.outputs import Logprob, TokenLogprobs, Usage

__all__ = ["Completion", "GenerationResult", "Logprob", "StreamPiece", "TokenLogprobs", "Usage"]


@dataclass(frozen=True)
class Completion:
    """One sampled continuation. finish_reason: stop (EOS, stop string or token), length, or abort.

    stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    usage: Usage = Usage(0)
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one prompt: `outputs` holds `n` completions; the shortcuts below read the first.

    Times are wall-clock from submission: `ttft_ms` to the first token on the host, queueing included;
    `tpot_ms` per output token after the first; `total_ms` to the last token.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    exact: bool = True

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def usage(self) -> Usage:
        return self.outputs[0].usage

    @property
    def ttft_ms(self) -> float:
        return self.outputs[0].ttft_ms

    @property
    def tpot_ms(self) -> float:
        return self.outputs[0].tpot_ms

    @property
    def total_ms(self) -> float:
        return self.outputs[0].total_ms

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of the prompt whose KV was found instead of computed."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0


@dataclass(frozen=True)
class StreamPiece:
    """What one step added to a streamed completion. `text` may be empty while a character is incomplete.

    `result` is set on the last piece only.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    usage: Usage = Usage(0)
    result: GenerationResult | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None
