"""SamplingParams: how one request picks its tokens. Plain data, checked on construction; knows no torch.

Names, defaults and meanings follow vLLM's `SamplingParams`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvboost.engine.structured_outputs import Form, StructuredOutputsParams, ToolCallForm
from kvboost.errors import InvalidRequest

MAX_LOGPROBS = 100
"""Most alternatives per token: a row of log-probabilities is copied to the host for each."""

MAX_N = 128

REPETITION_PENALTIES = (1e-3, 1e3)
"""Logits are multiplied and divided by it: beyond these they would overflow to infinity."""


@dataclass
class SamplingParams:
    """Sampling options of one request.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all. seed: same seed, same tokens, whatever else runs.
    max_tokens: None means up to `max_model_len`. min_tokens: no EOS and no stop token before this many.
    stop: strings that end the text (left out of it unless `include_stop_str_in_output`). None is read as no stop, as
    in stop_token_ids and bad_words; lists become tuples.
    logit_bias: `{token_id: added to its logit}`. allowed_token_ids: nothing else is ever picked.
    bad_words: strings that must not appear. logprobs / prompt_logprobs: alternatives per token (0: only the
    token itself). Log-probabilities are those of the raw model output, before penalties and temperature.
    structured_outputs: the form that the text must have; the text then ends where the form does, before min_tokens too.

    Fields may be assigned later, as in vLLM; each assignment is checked. A submitted request keeps what it was given.
    Raises `InvalidRequest` naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: Form | None = None

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_checked", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise InvalidRequest(name, "SamplingParams has no such field.")
        before = self.__dict__.get(name)
        object.__setattr__(self, name, _normalised(name, value))
        if "_checked" in self.__dict__:
            try:
                self._check()
            except InvalidRequest:
                object.__setattr__(self, name, before)
                raise

    def _check(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is above max_tokens={self.max_tokens}.")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", f"got {text!r}; each stop must be a non-empty string.")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip() or _has_surrogate(text):
                raise InvalidRequest(
                    "bad_words", f"got {text!r}; each bad word must be a non-blank string without lone surrogates."
                )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _whole(name, token, 0, None)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids", "is empty: no token could ever be picked. Leave it out, or list tokens."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)

        if self.structured_outputs is not None:
            given: Any = self.structured_outputs
            if not isinstance(given, (StructuredOutputsParams, ToolCallForm)):
                raise InvalidRequest(
                    "structured_outputs", f"got {type(given).__name__}; it must be a StructuredOutputsParams."
                )
            if self.ignore_eos:
                raise InvalidRequest(
                    "ignore_eos", "cannot go with structured_outputs: the text ends where its form is complete."
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


def _has_surrogate(text: str) -> bool:
    """Half of a character, which no tokenizer takes: JSON can write it, UTF-8 cannot."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _normalised(name: str, value: Any) -> Any:
    """Sequences as tuples, so that a params object never shares a list with its caller."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name in ("stop", "stop_token_ids", "bad_words"):
        return tuple(value or ())
    if name == "allowed_token_ids" and value is not None:
        return tuple(value)
    if name == "logit_bias" and value is not None:
        return _checked_bias(value)
    return value


def _checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    checked = {}
    for token, value in bias.items():
        if isinstance(token, str) and token.isdecimal():  # JSON objects have string keys
            token = int(token)
        _whole("logit_bias", token, 0, None)
        _number("logit_bias", value, -100.0, 100.0)
        checked[token] = float(value)
    return checked


def _number(name: str, value: Any, low: float, high: float | None, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if ok and (value < low or (open_low and value == low) or (high is not None and value > high)):
        ok = False
    if not ok:
        upper = "" if high is None else f" and at most {high:g}"
        raise InvalidRequest(
            name, f"got {value!r}; it must be a number {'above' if open_low else 'of at least'} {low:g}{upper}."
        )


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequest(name, f"got {value!r}; it must be a whole number of at least {low}{upper}.")
