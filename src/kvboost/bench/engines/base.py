"""What every measured engine does, and the model they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from kvboost.models.loading import load_config, load_model, load_tokenizer, locate, resolve_device


@dataclass(frozen=True)
class Answer:
    """One generated answer. Times are seconds from submission to the token being in the caller's hands.

    token_ids: empty when the engine gives text only. cached_tokens: prompt tokens found, or None when it does not say.
    """

    token_ids: list[int]
    token_times_s: list[float]
    total_s: float
    output_tokens: int
    cached_tokens: int | None = None
    text: str | None = None

    @property
    def ttft_ms(self) -> float:
        return self.token_times_s[0] * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) * 1e3 / (self.output_tokens - 1)


@dataclass(frozen=True)
class Batch:
    """Requests submitted together. how: one phrase that says what the engine did with them."""

    token_ids: list[list[int]]
    total_s: float
    output_tokens: int
    how: str
    cached_tokens: list[int] = field(default_factory=list)


class BenchEngine(Protocol):
    """Greedy generation on token ids. With `ignore_eos` exactly `max_new_tokens` are made."""

    name: str

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer: ...

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        """All prompts at once, EOS ignored."""
        ...

    def close(self) -> None: ...


class ModelSource:
    """The model under test. `model` is loaded on first use and shared by all Transformers engines."""

    def __init__(
        self,
        model_path: str,
        dtype: str = "auto",
        device: str = "auto",
        tokenizer: str | None = None,
        **engine_options: Any,
    ) -> None:
        self.path = model_path
        self.dtype = dtype
        self.device = resolve_device(device)
        self.engine_options = engine_options
        self._source = locate(model_path)
        self._tokenizer_source = self._source if tokenizer is None else locate(tokenizer)
        self._eos_ids: list[int] = []

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_source)

    @cached_property
    def config(self) -> Any:
        return load_config(self._source)

    @cached_property
    def model(self) -> Any:
        """Its generation_config has no EOS: Transformers would put it back into every call that wants to go on."""
        model = load_model(self._source, self.dtype, self.device, self.engine_options.get("weights", "auto"))
        eos = model.generation_config.eos_token_id
        self._eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        model.generation_config.eos_token_id = None
        return model

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer, from the model's generation_config."""
        return self._eos_ids if self.model is not None else []


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished, so that a time taken next is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
