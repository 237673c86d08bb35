"""Runs one planned step on the device: packs the tokens, calls the unchanged model once, returns the logits asked for.

The only file of the engine that calls the model. It knows nothing of who waits and why.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.attention.backends import Backend
from kvboost.attention.paged_torch import Span
from kvboost.attention.step import running
from kvboost.cache.pool import KVPool
from kvboost.engine.request import Request
from kvboost.engine.scheduler import StepPlan, Work
from kvboost.models.capabilities import Capabilities
from kvboost.models.compat import load_cache, store_cache
from kvboost.weights.plan import StreamStats
from kvboost.weights.streamer import streamer_of

if TYPE_CHECKING:
    from kvboost.engine.early_tokens import EarlyTokens  # its kernels need Triton


@dataclass(frozen=True)
class StepLogits:
    """Rows of logits of one step.

    `sampled[i]` belongs to `requests[i]`; it is empty where `early` has all tokens. `prompt_rows` holds `(request, first
    position, logits[n, V])` for prompts whose log-probabilities were asked for: row j predicts the token at position
    `first + j + 1`.
    """

    requests: list[Request]
    sampled: Tensor
    prompt_rows: list[tuple[Request, int, Tensor]]
    early: EarlyTokens | None = None


class Runner:
    """Runs the model over the pool. Keeps the model weakly: the engine's thread must not keep it alive."""

    def __init__(
        self, model: PreTrainedModel, capabilities: Capabilities, backend: Backend | None, pool: KVPool
    ) -> None:
        self._model = weakref.proxy(model)
        self._capabilities = capabilities
        self._backend = backend
        self._pool = pool
        self._device = pool.slabs.device
        self._streamer = streamer_of(model)

    @property
    def weights(self) -> StreamStats | None:
        """What streaming has done; None when all weights are resident."""
        return None if self._streamer is None else self._streamer.stats()

    @property
    def looks_ahead(self) -> bool:
        """Whether `run` returns before the device is done, and may be called for the step after it."""
        return False

    def run(self, plan: StepPlan, follows: StepLogits | None = None) -> StepLogits:
        """Make the planned copies, compute the KV of every planned token and the logits of the wanted ones.

        follows: the step before, when its tokens are not yet known to the host; only where `looks_ahead`.
        """
        work = plan.work
        if plan.copies:
            self._pool.copy(*zip(*plan.copies, strict=True))
        with nullcontext() if self._streamer is None else self._streamer.sweep():
            if self._capabilities.path == "paged":
                return self._run_packed(work, follows)
            # In plan order: a twin reads blocks that an earlier sequence of this step has just written.
            return _merge([self._run_alone(w) for w in work])

    def take_memory_ahead(self, num_touched: int) -> bool:
        """See `KVPool.take_ahead`; called while there is nothing else to do."""
        return self._pool.take_ahead(num_touched)

    def warm_up(self, max_num_seqs: int) -> int:
        """Do ahead of time what is done once per shape of step; returns the number of shapes."""
        return 0

    def clear(self, blocks: Sequence[int]) -> None:
        """Make the slots of these blocks zeros again."""
        if blocks:
            self._pool.slabs[list(blocks)] = 0

    def _run_packed(self, work: Sequence[Work], follows: StepLogits | None = None) -> StepLogits:
        assert self._backend is not None and self._backend.make_step is not None and follows is None
        # Decoders first and by length: the attention pads neighbours into one call.
        work = sorted(work, key=lambda w: (w.count > 1, w.start + w.count if w.count == 1 else 0))
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for w in work:
            ids += w.request.tokens[w.start : w.start + w.count]
            positions += range(w.start, w.start + w.count)
            spans.append(Span(w.start, w.count, w.request.blocks))
        wanted = WantedRows(work)
        step = self._backend.make_step(self._pool, spans, self._capabilities.layer_ids)
        mask = torch.ones(1, len(ids), dtype=torch.bool, device=self._device)
        with running(step):
            logits = self._call(ids, positions, wanted.rows, use_cache=False, attention_mask=mask)
        require_attended(step.num_attended, len(self._capabilities.layers))
        return wanted.sort(logits)

    def _run_alone(self, work: Work) -> StepLogits:
        table = torch.tensor(work.request.blocks, device=self._device)
        cache = load_cache(self._pool, table, work.start)
        wanted = WantedRows([work])
        ids = work.request.tokens[work.start : work.start + work.count]
        positions = range(work.start, work.start + work.count)
        mask = torch.ones(1, work.start + work.count, dtype=torch.long, device=self._device)
        extra: dict[str, Any] = {self._capabilities.cache_argument: cache, "attention_mask": mask}
        logits = self._call(ids, list(positions), wanted.rows, use_cache=True, **extra)
        store_cache(self._pool, cache, table, work.start, work.count)
        return wanted.sort(logits)

    def _call(self, ids: list[int], positions: list[int], rows: list[int], **extra: Any) -> Tensor:
        """Logits `[len(rows), V]` of the given rows of the packed tokens."""
        if self._capabilities.takes_positions:
            extra["position_ids"] = torch.tensor([positions], device=self._device)
        # A step without wanted rows (a middle chunk) still passes one: an empty selection breaks some heads.
        keep = torch.tensor(rows or [0], device=self._device)
        if self._capabilities.takes_logits_to_keep:
            extra["logits_to_keep"] = keep
        logits: Tensor = self._model(input_ids=torch.tensor([ids], device=self._device), **extra).logits[0]
        if not self._capabilities.takes_logits_to_keep:
            logits = logits[keep]
        return logits[: len(rows)]


def require_attended(served: int, layers: int) -> None:
    """Raises `RuntimeError` when some layer's attention went elsewhere."""
    if served != layers:
        raise RuntimeError("the model's attention was switched away from KVBoost (set_attn_implementation?). "
                           "Make a new engine, or leave the model's attention alone.")  # fmt: skip


class WantedRows:
    """Which packed rows need logits, and whose they are."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.rows: list[int] = []
        self._sampled: list[int] = []
        self._requests: list[Request] = []
        self._prompts: list[tuple[Request, int, int, int]] = []
        begin = 0
        for w in work:
            if w.request.prompt_logprobs is not None:
                # Row of position p predicts p + 1; the last prompt position predicts output, not prompt.
                count = min(w.start + w.count, w.request.num_prompt - 1) - w.start
                if count > 0:
                    self._prompts.append((w.request, w.start, len(self.rows), count))
                    self.rows += range(begin, begin + count)
            if w.sample:
                self._sampled.append(len(self.rows))
                self._requests.append(w.request)
                self.rows.append(begin + w.count - 1)
            begin += w.count

    def sort(self, logits: Tensor) -> StepLogits:
        sampled = logits if not self._prompts else logits[self._sampled]
        prompts = [(request, first, logits[at : at + count]) for request, first, at, count in self._prompts]
        return StepLogits(self._requests, sampled, prompts)


def _merge(parts: Sequence[StepLogits]) -> StepLogits:
    sampled = [p.sampled for p in parts if p.requests]
    return StepLogits(
        [request for p in parts for request in p.requests],
        torch.cat(sampled) if sampled else parts[0].sampled[:0],
        [row for p in parts for row in p.prompt_rows],
    )
