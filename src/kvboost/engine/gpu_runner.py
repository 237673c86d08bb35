"""Runs steps on a GPU: static inputs, Triton attention, CUDA graphs, and tokens that are chosen before the host looks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.attention.paged_torch import Span
from kvboost.attention.paged_triton import TritonStep
from kvboost.attention.step import running
from kvboost.attention.step_tensors import StepInputs, StepTensors
from kvboost.cache.pool import KVPool
from kvboost.engine.early_tokens import TokenPost
from kvboost.engine.graphs import DECODE_SIZES, PROMPT_TOKENS, Graphs, Padding, padding_for
from kvboost.engine.runner import Runner, StepLogits, WantedRows, require_attended
from kvboost.engine.scheduler import Work
from kvboost.kernels.triton.greedy import best_tokens
from kvboost.models.capabilities import Capabilities

MAX_TABLE_ENTRIES = 4 << 20
"""Block table entries of one step, all sequences together: 16 MiB, 67 million tokens of context."""


class GpuRunner(Runner):
    """The paged path over Triton kernels. On a device without CUDA (tests) it runs without graphs."""

    def __init__(
        self,
        model: PreTrainedModel,
        capabilities: Capabilities,
        pool: KVPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        super().__init__(model, capabilities, None, pool)
        block_size = pool.layout.block_size
        seqs = max(max_num_seqs + 1, DECODE_SIZES[-1])
        self._tensors = StepTensors(
            max(max_num_batched_tokens, PROMPT_TOKENS[-1], seqs),
            seqs,
            min(max_num_seqs * pool.num_blocks, MAX_TABLE_ENTRIES),
            block_size,
            self._device,
        )
        self._post = TokenPost(seqs, self._device)
        streamer = self._streamer
        capturable = self._device.type == "cuda" and (streamer is None or streamer.capturable)
        self._all_seen = torch.ones(1, self._tensors.capacity_tokens, dtype=torch.bool, device=self._device)
        self._graphs: Graphs[tuple[Tensor, Tensor]] | None = None
        if capturable:
            self._graphs = Graphs(self._device, None if streamer is None else streamer.begin)

    @property
    def looks_ahead(self) -> bool:
        return True

    def _run_packed(self, work: Sequence[Work], follows: StepLogits | None = None) -> StepLogits:
        """`follows`: the step whose chosen tokens, still on the device, are among the inputs of this one."""
        ordered = sorted(work, key=_place)
        spans = [Span(w.start, w.count, w.request.blocks) for w in ordered]
        prompt_rows = any(w.request.prompt_logprobs is not None for w in ordered)
        tokens = sum(w.count for w in ordered)
        padding = None if self._graphs is None or prompt_rows else padding_for(tokens, len(ordered))
        early = None if follows is None else follows.early
        inputs = self._fill(spans, _token_ids(ordered, follows), padding, None if early is None else early.tokens)
        if prompt_rows:
            wanted = WantedRows(ordered)
            keep = torch.tensor(wanted.rows or [0], device=self._device)
            return wanted.sort(self._forward(inputs, keep)[: len(wanted.rows)])

        forward = partial(self._last_rows, inputs)
        graphs = None if padding is None else self._graphs
        logits, chosen = forward() if graphs is None else graphs.run(inputs.key, forward)
        return self._sampled(ordered, logits, chosen)

    def _fill(self, spans: Sequence[Span], ids: Any, padding: Padding | None, chosen: Tensor | None) -> StepInputs:
        if padding is None:
            return self._tensors.fill(spans, ids, chosen=chosen)
        return self._tensors.fill(spans, ids, pad_tokens_to=padding.tokens, pad_seqs_to=padding.seqs, chosen=chosen)

    def _last_rows(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Logits of the last row of every sequence, and the best tokens of these rows, whoever may want them."""
        logits = self._forward(inputs, inputs.last_rows if inputs.batch.prompts else None)
        return logits, best_tokens(logits)

    def _forward(self, inputs: StepInputs, keep: Tensor | None) -> Tensor:
        """Logits of the rows `keep`; None: of all, which are the last of their sequences when every sequence has one."""
        step = TritonStep(self._pool, inputs, self._capabilities.layer_ids)
        extra: dict[str, Any] = {"use_cache": False, "attention_mask": self._all_seen[:, : len(inputs.ids)]}
        if self._capabilities.takes_logits_to_keep:
            extra["logits_to_keep"] = 0 if keep is None else keep
        with running(step):
            logits: Tensor = self._model(
                input_ids=inputs.ids[None], position_ids=inputs.batch.positions[None], **extra
            ).logits[0]
        require_attended(step.num_attended, len(self._capabilities.layers))
        return logits if keep is None or self._capabilities.takes_logits_to_keep else logits[keep]

    def _sampled(self, ordered: Sequence[Work], logits: Tensor, chosen: Tensor) -> StepLogits:
        places = [i for i, w in enumerate(ordered) if w.sample]
        requests = [ordered[i].request for i in places]
        if requests and all(r.greedy_only for r in requests):
            return StepLogits(requests, logits[:0], [], self._post.send(chosen, places))
        if len(places) < len(ordered):
            logits = logits[torch.tensor(places, dtype=torch.long, device=self._device)]
        return StepLogits(requests, logits[: len(places)], [])

    def warm_up(self, max_num_seqs: int) -> int:
        """Capture decode graphs for all batch sizes, of sequences that share keys and that do not, and prompt graphs for one
        sequence, largest first."""
        if self._graphs is None:
            return 0
        sizes = [n for n in DECODE_SIZES if n <= max(max_num_seqs, DECODE_SIZES[0])]
        shapes = [(n, n, False) for n in sizes] + [(n, n, True) for n in sizes if n > 1]
        shapes += [(n, 4, False) for n in PROMPT_TOKENS if n <= self._tensors.capacity_tokens]
        with nullcontext() if self._streamer is None else self._streamer.sweep():
            for tokens, seqs, shares in sorted(shapes, reverse=True):
                inputs = self._tensors.fill([], None, pad_tokens_to=tokens, pad_seqs_to=seqs, shares=shares)
                self._graphs.capture(inputs.key, partial(self._last_rows, inputs))
        return self._graphs.count


def _place(work: Work) -> tuple[bool, int]:
    """Decoding comes first, sequences that begin with the same block next to one another."""
    return work.count > 1, work.request.blocks[0] if work.count == 1 else 0


def _token_ids(work: Sequence[Work], follows: StepLogits | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of all tokens in packed order; -1 - r for the one that is being chosen in row r of the step before."""
    early = None if follows is None else follows.early
    row_of = {} if early is None else dict(zip(map(id, follows.requests), early.rows, strict=True))  # type: ignore[union-attr]
    ids: list[int] = []
    for w in work:
        ids += w.request.tokens[w.start : w.start + w.count] or (-1 - row_of[id(w.request)],)
    return np.array(ids, dtype=np.int64)
