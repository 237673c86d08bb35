"""Paged attention in plain PyTorch: correct on any device.

Tokens of a step stand in one row: first the sequences that add one token (decode), then the others. The decoders are
attended in a few padded calls, never one by one; every other sequence gets a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvboost.attention.math import attend
from kvboost.cache.pool import KVPool

MAX_PADDING_RATIO = 1.5
"""Decoders share a padded call while the longest is at most this much longer than the shortest."""

PADDING_TOKENS_ALLOWED = 128
"""... or the difference is at most this many tokens, since a call costs more than they do."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in the packed row: `count` tokens from position `start`."""

    start: int
    count: int
    table: Sequence[int]

    @property
    def kv_len(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class _Group:
    """Decoders `rows[begin:end]` of the packed row, attended in one call. mask None: all keys are seen."""

    begin: int
    end: int
    tables: Tensor
    length: int
    mask: Tensor | None


@dataclass(slots=True)
class _Prompt:
    """A sequence with several new tokens, `rows[begin:end]`. tables None: nothing is cached, use its own keys."""

    begin: int
    end: int
    tables: Tensor | None
    length: int
    mask: Tensor | None


@dataclass(slots=True)
class _View:
    """Who sees what under one window size; made once per step and window, used by every layer that has it."""

    groups: list[_Group] = field(default_factory=list)
    prompts: list[_Prompt] = field(default_factory=list)


class PagedStep:
    """The attention of one step over `pool`. `spans` are in packed order, those of one token first.

    `num_attended` counts the layers served: fewer than the model has means that its attention went elsewhere.
    """

    def __init__(self, pool: KVPool, spans: Sequence[Span], layer_ids: dict[int, int]) -> None:
        self._pool = pool
        self._layers = layer_ids
        self._size = pool.layout.block_size
        self._device = pool.slabs.device
        self._decoders = [s for s in spans if s.count == 1]
        self._prompts = [s for s in spans if s.count > 1]
        self._views: dict[int | None, _View] = {}
        self.num_attended = 0
        blocks, offsets = [], []
        for span in spans:
            for position in range(span.start, span.kv_len):
                blocks.append(span.table[position // self._size])
                offsets.append(position % self._size)
        self._block = torch.tensor(blocks, device=self._device)
        self._offset = torch.tensor(offsets, device=self._device)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Write the new keys and values, then attend. Shapes as in `StepAttention.attend`."""
        layer = self._layers[module.layer_idx]  # type: ignore[index]
        self._pool.write(layer, self._block, self._offset, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self.num_attended += 1
        view = self._view(sliding_window)
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": s_aux}
        pieces = []
        for group in view.groups:
            k, v = self._pool.gather(layer, group.tables)
            q = query[0, :, group.begin : group.end].transpose(0, 1).unsqueeze(2)  # [S, Hq, 1, D]
            out = attend(q, k[:, :, : group.length], v[:, :, : group.length], mask=group.mask, **options)
            pieces.append(out.squeeze(2))
        for prompt in view.prompts:
            q = query[:, :, prompt.begin : prompt.end]
            if prompt.tables is None:
                k, v = key[:, :, prompt.begin : prompt.end], value[:, :, prompt.begin : prompt.end]
            else:
                k, v = self._pool.gather(layer, prompt.tables)
                k, v = k[:, :, : prompt.length], v[:, :, : prompt.length]
            out = attend(q, k, v, mask=prompt.mask, causal=prompt.mask is None, **options)
            pieces.append(out[0].transpose(0, 1))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).unsqueeze(0)

    # -- who sees what ---------------------------------------------------------------------------------------------

    def _view(self, window: int | None) -> _View:
        view = self._views.get(window)
        if view is None:
            view = self._views[window] = _View()
            begin = 0
            for group in _by_length(self._decoders):
                view.groups.append(self._group(begin, group, window))
                begin += len(group)
            for span in self._prompts:
                view.prompts.append(self._prompt(begin, span, window))
                begin += span.count
        return view

    def _group(self, begin: int, spans: Sequence[Span], window: int | None) -> _Group:
        size = self._size
        first = [0 if window is None else max(0, s.kv_len - window) // size for s in spans]
        lengths = np.array([s.kv_len - f * size for s, f in zip(spans, first, strict=True)])
        width = -(-int(lengths.max()) // size)
        tables = np.zeros((len(spans), width), dtype=np.int64)
        for row, (span, skip) in enumerate(zip(spans, first, strict=True)):
            blocks = span.table[skip : -(-span.kv_len // size)]
            tables[row, : len(blocks)] = blocks
        longest = int(lengths.max())
        position = np.arange(longest)
        seen = position[None] < lengths[:, None]
        if window is not None:
            seen &= position[None] >= (lengths - window)[:, None]
        mask = None if seen.all() else self._additive(torch.from_numpy(seen)[:, None, None, :])
        return _Group(begin, begin + len(spans), torch.from_numpy(tables).to(self._device), longest, mask)

    def _prompt(self, begin: int, span: Span, window: int | None) -> _Prompt:
        size = self._size
        if span.start == 0 and (window is None or span.count <= window):
            return _Prompt(begin, begin + span.count, None, span.count, None)
        skip = 0 if window is None else max(0, span.start - window + 1) // size
        blocks = span.table[skip : -(-span.kv_len // size)]
        tables = torch.tensor([list(blocks)], device=self._device)
        key_position = torch.arange(skip * size, span.kv_len, device=self._device)
        position = torch.arange(span.start, span.kv_len, device=self._device)[:, None]
        mask = key_position <= position
        if window is not None:
            mask &= key_position > position - window
        return _Prompt(begin, begin + span.count, tables, span.kv_len - skip * size, self._additive(mask[None, None]))

    def _additive(self, seen: Tensor) -> Tensor:
        """0 where seen, -inf elsewhere: made once per step, where SDPA would convert a bool mask in every layer."""
        slabs = self._pool.slabs
        mask = torch.zeros(seen.shape, dtype=slabs.dtype, device=slabs.device)
        return mask.masked_fill_(~seen.to(slabs.device), float("-inf"))


def _by_length(spans: Sequence[Span]) -> list[Sequence[Span]]:
    """Cut spans, sorted by length, where padding would cost more than another call."""
    groups: list[Sequence[Span]] = []
    begin = 0
    for i, span in enumerate(spans):
        shortest = spans[begin].kv_len
        if span.kv_len > max(shortest * MAX_PADDING_RATIO, shortest + PADDING_TOKENS_ALLOWED):
            groups.append(spans[begin:i])
            begin = i
    if begin < len(spans):
        groups.append(spans[begin:])
    return groups
