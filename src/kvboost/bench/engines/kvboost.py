"""KVBoost through its public API: stream() for one request, generate() for many."""

from __future__ import annotations

import time
from typing import Any

from kvboost.api.kvboost import KVBoost
from kvboost.bench.engines.base import Answer, Batch, ModelSource
from kvboost.engine.stats import EngineStats


class KVBoostEngine:
    name = "kvboost"

    def __init__(self, source: ModelSource) -> None:
        self._llm = KVBoost.from_pretrained(
            source.path, dtype=source.dtype, device=source.device, tokenizer=source.tokenizer, **source.engine_options
        )

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer:
        start = time.perf_counter()
        times: list[float] = []
        output: list[int] = []
        cached = 0
        for piece in self._llm.stream(ids, max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos):
            times += [time.perf_counter() - start] * len(piece.token_ids)
            output += piece.token_ids
            cached = piece.usage.cached_tokens
        return Answer(output, times, time.perf_counter() - start, len(output), cached)

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        start = time.perf_counter()
        results = self._llm.generate(prompts, max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        total = time.perf_counter() - start
        outputs = [r.token_ids for r in results]
        cached = [r.usage.cached_tokens for r in results]
        return Batch(outputs, total, sum(map(len, outputs)), "continuous batching over shared blocks", cached)

    def stats(self) -> EngineStats:
        return self._llm.stats()

    @property
    def model(self) -> Any:
        return self._llm.model

    @property
    def slot_bytes(self) -> int:
        """Device bytes of one token slot, K and V of all layers."""
        return self._llm.built.layout.bytes_per_token

    @property
    def max_model_len(self) -> int:
        return self._llm.max_model_len

    def close(self) -> None:
        self._llm.close()
