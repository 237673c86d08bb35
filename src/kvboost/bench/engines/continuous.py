"""Transformers' continuous batching: the manager that generate_batch starts, kept alive so that it can reuse prefixes."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvboost.bench.engines.base import Answer, Batch, ModelSource
from kvboost.errors import EngineStepError

CPU_TOKENS = 40_960
"""KV slots on a CPU, where Transformers cannot size its pool by itself: 64 sequences of 640 tokens."""

NO_EOS = -1
"""An EOS id that is never sampled, so that the manager makes the number of tokens it is asked for."""

PAGE_TOKENS = 256
"""Transformers' own default."""

TIMEOUT_S = 600


class ContinuousBatchingEngine:
    name = "transformers-cb"

    def __init__(self, source: ModelSource) -> None:
        # Its attention implementation is set on the model, so it gets module objects of its own over the same weights.
        self._model = shared_copy(source.model)
        self._eos_ids = source.eos_ids
        config = GenerationConfig(
            do_sample=False, eos_token_id=NO_EOS, pad_token_id=self._eos_ids[0] if self._eos_ids else 0
        )
        options: dict[str, Any] = {}
        if source.device.type == "cpu":
            names = {f.name for f in dataclasses.fields(ContinuousBatchingConfig)}
            page = "page_size" if "page_size" in names else "block_size"
            options = {page: PAGE_TOKENS, "num_blocks": CPU_TOKENS // PAGE_TOKENS, "max_batch_tokens": 2048}
        self._manager = self._model.init_continuous_batching(
            generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**options)
        )
        self._manager.start()

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer:
        """EOS is cut off afterwards when it counts: the manager was started without it."""
        start = time.perf_counter()
        request = self._manager.add_request(list(ids), max_new_tokens=max_new_tokens, streaming=True)
        times: list[float] = []
        output: list[int] = []
        while len(output) < max_new_tokens:
            result = self._result(start, request)
            if result is not None:
                output = list(result.generated_tokens)
                times += [time.perf_counter() - start] * (len(output) - len(times))
        if not ignore_eos:
            end = next((i + 1 for i, t in enumerate(output) if t in self._eos_ids), len(output))
            output, times = output[:end], times[:end]
        return Answer(output, times, time.perf_counter() - start, len(output))

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        start = time.perf_counter()
        requests = self._manager.add_requests([list(p) for p in prompts], max_new_tokens=max_new_tokens)
        done: dict[str, list[int]] = {}
        while len(done) < len(prompts):
            result = self._result(start)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        outputs = [done[r] for r in requests]
        return Batch(outputs, time.perf_counter() - start, sum(map(len, outputs)), "its continuous batching")

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5)

    def _result(self, start: float, request: str | None = None) -> Any:
        """The next result, or None after a short wait. Raises `EngineStepError` when the manager failed."""
        result = self._manager.get_result(request_id=request, timeout=0.5)
        if result is not None and result.error:
            raise EngineStepError(f"transformers-cb: {result.error}")
        if result is None and (not self._manager.is_running() or time.perf_counter() - start > TIMEOUT_S):
            raise EngineStepError("transformers-cb: its generation thread ended or hangs. Leave it out of --engines.")
        return result


def shared_copy(model: torch.nn.Module) -> Any:
    """The same parameters and buffers in new module objects."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})
