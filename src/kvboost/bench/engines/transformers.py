"""Transformers' own generate, three ways: nothing kept, past_key_values kept by hand, static allocation."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvboost.bench.engines.base import Answer, Batch, ModelSource, synchronize
from kvboost.bench.workloads import common_prefix


class _Clock(BaseStreamer):
    """Notes when each token arrives; Transformers puts the prompt first."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter() - self.start)
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersEngine:
    """`model.generate` with a new DynamicCache per call."""

    name = "transformers"
    how = "static batch, left-padded"

    def __init__(self, source: ModelSource) -> None:
        self.model = source.model
        self._eos_ids = source.eos_ids
        self._pad = self._eos_ids[0] if self._eos_ids else 0
        self._config = _greedy(self.model.generation_config, self._pad)
        # Transformers renamed the argument in 5.2x; the old name is accepted with a warning for now.
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer:
        clock = _Clock()
        cache, found = self._reuse(ids)
        rows = self._run([ids], [[1] * len(ids)], max_new_tokens, ignore_eos, cache, clock)
        total = time.perf_counter() - clock.start
        output = rows[0][len(ids) :]
        self._keep(ids + output, cache)
        return Answer(output, clock.times, total, len(output), found)

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        start = time.perf_counter()
        ids, mask = left_padded(prompts, self._pad)
        rows = self._run(ids, mask, max_new_tokens, True)
        return self._as_batch(rows, len(ids[0]), start)

    def close(self) -> None:
        del self.model

    def _reuse(self, ids: list[int]) -> tuple[Any, int]:
        """(cache to continue or None, tokens it holds)."""
        return None, 0

    def _keep(self, ids: list[int], cache: Any) -> None:
        """Called with everything that was generated, after the clock has stopped."""

    def _as_batch(self, rows: list[list[int]], prompt_tokens: int, start: float) -> Batch:
        outputs = [row[prompt_tokens:] for row in rows]
        return Batch(outputs, time.perf_counter() - start, sum(map(len, outputs)), self.how)

    def _run(
        self,
        ids: list[list[int]],
        mask: list[list[int]],
        max_new_tokens: int,
        ignore_eos: bool,
        cache: Any = None,
        streamer: BaseStreamer | None = None,
    ) -> list[list[int]]:
        """Prompt and answer of each row, [rows][tokens]."""
        device = self.model.device
        config = copy.copy(self._config)
        config.max_new_tokens = max_new_tokens
        config.eos_token_id = None if ignore_eos else self._eos_ids or None
        with torch.inference_mode():
            rows = self.model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                streamer=streamer,
                **({} if cache is None else {self._cache_name: cache}),
            )
            synchronize(device)
        return [list(row) for row in rows.tolist()]


class PkvEngine(TransformersEngine):
    """Best case of reuse by hand: one DynamicCache is kept, cut to what the next prompt shares with it, and continued."""

    name = "transformers-pkv"
    how = "shared prefix computed once and repeated over a static, padded batch"

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        self._cache: Any = None
        self._held: list[int] = []

    def close(self) -> None:
        self._cache = None
        super().close()

    def _reuse(self, ids: list[int]) -> tuple[Any, int]:
        # At least one token must be left to compute, or there are no logits.
        shared = min(common_prefix(self._held, ids), len(ids) - 1)
        cache, self._cache = self._cache, None
        if cache is None or shared == 0:
            return DynamicCache(config=self.model.config), 0
        excess = cache.get_seq_length() - shared
        if excess:
            cache.crop(-excess)  # a positive length raises from 5.18 on; a negative count works in all versions
        return cache, shared

    def _keep(self, ids: list[int], cache: Any) -> None:
        self._cache = cache
        self._held = ids[: cache.get_seq_length()]

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        """Padding stands between the repeated prefix and each row's own tokens, masked out."""
        start = time.perf_counter()
        shared = min(min(common_prefix(prompts[0], p), len(p) - 1) for p in prompts)
        if shared == 0:
            return super().batch(prompts, max_new_tokens)
        cache = DynamicCache(config=self.model.config)
        prefix = prompts[0][:shared]
        with torch.inference_mode():
            # The body without the head: the prefix needs no logits.
            self.model.base_model(
                torch.tensor([prefix], device=self.model.device), use_cache=True, **{self._cache_name: cache}
            )
            cache.batch_repeat_interleave(len(prompts))
        own, own_mask = left_padded([p[shared:] for p in prompts], self._pad)
        ids = [prefix + row for row in own]
        mask = [[1] * shared + row for row in own_mask]
        rows = self._run(ids, mask, max_new_tokens, True, cache)
        return self._as_batch(rows, len(ids[0]), start)


class StaticEngine(TransformersEngine):
    """StaticCache: every row is allocated to the longest prompt plus the whole answer before the first token."""

    name = "transformers-static"
    how = "static batch, left-padded, StaticCache of the longest row"

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        self._config.cache_implementation = "static"


def left_padded(prompts: list[list[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, attention mask), both [rows][longest prompt]."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return ids, mask


def _greedy(config: Any, pad: int) -> Any:
    """The model's generation_config with sampling off, so that only the likeliest token is ever taken."""
    config = copy.deepcopy(config)
    config.do_sample = False
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
        if hasattr(config, name):
            setattr(config, name, None)
    config.max_length = None
    config.pad_token_id = pad
    return config
