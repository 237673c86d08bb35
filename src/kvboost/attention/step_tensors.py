"""What a step tells the GPU, packed on the host and fetched in one copy.

For given numbers of tokens and sequences every array has the same place on the device in every step, so a CUDA graph
captured over the views of one step serves all later steps of that shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvboost.attention.paged_torch import Span
from kvboost.attention.sharing import MAX_GROUPS, Int32s, Piece, shared_pieces
from kvboost.kernels.triton.attention import PackedBatch, SharedKeys
from kvboost.kernels.triton.host_copies import fetch

ALIGNMENT_BYTES = 64
"""Triton compiles another variant for pointers that are not multiples of 16 bytes; 64 is a cache line of the host."""

STAGES = 2
"""Host buffers: one is being filled while the other may still be on its way to the device."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device views of one step. ids `[T]` int64; slots `[T]` int64, -1 for padding; `batch.positions` `[T]` int64; last_rows
    `[S]` int64, the last token of every sequence; padded ones without tokens repeat that of the one before.

    alone: when the whole step is one sequence, without padding, how many keys it has; else 0. key: equal for two steps exactly when all
    shapes, addresses and launches are, so it names a captured graph.
    """

    ids: Tensor
    slots: Tensor
    last_rows: Tensor
    batch: PackedBatch
    alone: int
    key: tuple[int, int, int, bool, bool]


class StepTensors:
    """Static device memory for the inputs of a step, filled from pinned host memory.

    capacity_blocks counts the table entries of all sequences of a step together: sequences that share blocks each
    list them.
    """

    def __init__(
        self, capacity_tokens: int, capacity_seqs: int, capacity_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.capacity_tokens, self.capacity_seqs = capacity_tokens, capacity_seqs
        self.capacity_blocks = capacity_blocks
        self._size = block_size
        total = _Offsets(capacity_tokens, capacity_seqs).tables + _whole_words(4 * capacity_blocks)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(STAGES)]
        self._sent: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(STAGES)]
        self._turn = 0
        self._known = _KnownTables()
        self._padded: dict[tuple[int, int, int, bool, bool], StepInputs] = {}
        """Views of padded steps, of which there are few: making them takes longer than all else but the tables."""

    def fill(
        self,
        spans: Sequence[Span],
        ids: Sequence[int] | npt.NDArray[np.int64] | None = None,
        *,
        pad_tokens_to: int | None = None,
        pad_seqs_to: int | None = None,
        shares: bool = False,
        chosen: Tensor | None = None,
    ) -> StepInputs:
        """Pack `spans` (those of one token first) and start copying; the stream of the caller orders what follows.

        ids: of all tokens in packed order; None leaves zeros, for a caller that writes ids on the device. Padding:
        tokens get slot -1 and belong to sequences without keys, one token each where the sequences suffice, else all
        to the first; so padded tokens need at least one padded sequence. A table that was seen in an earlier step may
        have changed at its end only: grown, or been cut and then seen before it grew again. Raises ValueError beyond
        the capacities. shares: launch for sequences that share keys even where none do. chosen: int32 on the device; an id
        of -1 - r becomes `chosen[r]`, which the host need not know yet.
        """
        table = np.array([(s.start, s.count) for s in spans], dtype=np.int64).reshape(-1, 2)
        start, count = table[:, 0], table[:, 1]
        real_tokens, real_seqs = int(count.sum()), len(spans)
        tokens = real_tokens if pad_tokens_to is None else pad_tokens_to
        seqs = real_seqs if pad_seqs_to is None else pad_seqs_to
        kv_len = start + count
        needed = -(-kv_len // self._size)
        self._check(real_tokens, real_seqs, tokens, seqs, int(needed.sum()))

        at = _Offsets(tokens, seqs)
        host = self._next_host()
        host_ids, positions, slots = (host[a : a + 8 * tokens].view(np.int64) for a in (at.ids, at.positions, at.slots))
        query_start, table_start, lengths = (
            host[a : a + 4 * n].view(np.int32)
            for a, n in ((at.query_start, seqs + 1), (at.table_start, seqs), (at.kv_len, seqs))
        )
        tables = host[at.tables : at.tables + 4 * int(needed.sum())].view(np.int32)

        counts = np.zeros(seqs, dtype=np.int64)
        counts[:real_seqs] = count
        counts[real_seqs:] = _padding(tokens - real_tokens, seqs - real_seqs)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        host[at.last_rows : at.last_rows + 8 * seqs].view(np.int64)[:] = query_start[1:] - 1
        lengths[:real_seqs] = kv_len
        lengths[real_seqs:] = 0
        table_start[:] = 0
        np.cumsum(needed[:-1], out=table_start[1:real_seqs])
        rows = [self._known.row(s.table, n) for s, n in zip(spans, needed.tolist(), strict=True)]
        if real_seqs:
            np.concatenate(rows, out=tables)
        self._known.forget_unused()
        singles = _leading_ones(count)
        pieces = shared_pieces(rows[:singles], (start[:singles] // self._size).tolist(), self._size)
        if shares and not pieces:
            pieces = [(0, singles, 0)]
        if pieces:
            self._share(host, at, pieces, _leading_ones(counts), table_start, seqs)

        owner = np.repeat(np.arange(real_seqs), count)
        position = np.arange(real_tokens) + (start - query_start[:real_seqs])[owner]
        positions[:real_tokens] = position
        positions[real_tokens:] = 0
        block = tables[table_start[owner] + position // self._size].astype(np.int64)
        slots[:real_tokens] = block * self._size + position % self._size
        slots[real_tokens:] = -1
        host_ids[:] = 0
        if ids is not None:
            host_ids[:real_tokens] = ids
        self._send(at.tables + _whole_words(tables.nbytes), real_tokens, chosen)

        padded = tokens > real_tokens or seqs > real_seqs
        decode_seqs, prompts = singles, singles < real_seqs
        if padded:  # launch for whatever may come in this shape, not for what is there
            prompts = prompts or tokens != seqs
            decode_seqs = min(seqs, tokens) if singles or not prompts else 0
        key = (tokens, seqs, decode_seqs, prompts, bool(pieces))
        if not padded:
            return self._inputs(at, key, int(kv_len[0]) if real_seqs == 1 else 0)
        known = self._padded.get(key)
        if known is None:
            known = self._padded[key] = self._inputs(at, key, 0)
        return known

    def _share(
        self,
        host: npt.NDArray[np.uint8],
        at: _Offsets,
        pieces: list[Piece],
        singles: int,
        table_start: Int32s,
        seqs: int,
    ) -> None:
        """What the decoding rows share, for the kernels; `singles`: rows of one token with those of padding."""
        begins, starts, lengths, kv_begin = (
            host[a : a + 4 * n].view(np.int32)
            for a, n in (
                (at.group_start, MAX_GROUPS + 1), (at.group_table, MAX_GROUPS), (at.group_len, MAX_GROUPS), (at.kv_begin, seqs),
            )
        )  # fmt: skip
        begins[:], starts[:], lengths[:], kv_begin[:] = singles, 0, 0, 0
        for i, (first, end, blocks) in enumerate(pieces):
            begins[i], starts[i], lengths[i] = first, table_start[first], blocks * self._size
            kv_begin[first:end] = blocks * self._size
        if pieces[-1][2] and singles > pieces[-1][1]:  # padding shares nothing
            begins[len(pieces)] = pieces[-1][1]

    def _inputs(self, at: _Offsets, key: tuple[int, int, int, bool, bool], alone: int) -> StepInputs:
        tokens, seqs, decode_seqs, prompts, shares = key
        wide, narrow = torch.int64, torch.int32
        shared = None
        if shares:
            shared = SharedKeys(
                query_start=self._view(at.group_start, MAX_GROUPS + 1, narrow),
                table_start=self._view(at.group_table, MAX_GROUPS, narrow),
                kv_len=self._view(at.group_len, MAX_GROUPS, narrow),
                kv_begin=self._view(at.kv_begin, seqs, narrow),
            )
        batch = PackedBatch(
            positions=self._view(at.positions, tokens, wide),
            query_start=self._view(at.query_start, seqs + 1, narrow),
            tables=self._view(at.tables, self.capacity_blocks, narrow),
            table_start=self._view(at.table_start, seqs, narrow),
            kv_len=self._view(at.kv_len, seqs, narrow),
            decode_seqs=decode_seqs,
            prompts=prompts,
            shared=shared,
        )
        ids, slots = self._view(at.ids, tokens, wide), self._view(at.slots, tokens, wide)
        last_rows = self._view(at.last_rows, seqs, wide)
        return StepInputs(ids, slots, last_rows, batch, alone, key)

    def _view(self, offset: int, length: int, dtype: torch.dtype) -> Tensor:
        return self._device[offset : offset + length * dtype.itemsize].view(dtype)

    def _next_host(self) -> npt.NDArray[np.uint8]:
        self._turn = (self._turn + 1) % STAGES
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()  # the copy of STAGES steps ago: over long since
        return self._hosts[self._turn].numpy()

    def _send(self, num_bytes: int, num_ids: int, chosen: Tensor | None) -> None:
        fetch(self._hosts[self._turn][:num_bytes], self._device[:num_bytes], num_ids, chosen)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].record()

    def _check(self, real_tokens: int, real_seqs: int, tokens: int, seqs: int, blocks: int) -> None:
        for name, used, capacity in (
            ("tokens", tokens, self.capacity_tokens),
            ("seqs", seqs, self.capacity_seqs),
            ("blocks", blocks, self.capacity_blocks),
        ):
            if used > capacity:
                raise ValueError(f"a step with {used} {name} needs capacity_{name} of as many, not {capacity}.")
        if tokens < real_tokens or seqs < real_seqs:
            raise ValueError(f"{real_tokens} tokens of {real_seqs} sequences cannot be padded to {tokens} and {seqs}.")
        if tokens > real_tokens and seqs == real_seqs:
            raise ValueError("padded tokens need a padded sequence to belong to: raise pad_seqs_to by at least 1.")


class _Offsets:
    """Where each array of a step with so many tokens and sequences begins, in bytes. The tables stand last: only as
    much of them as is used gets copied."""

    def __init__(self, tokens: int, seqs: int) -> None:
        at = 0

        def place(num_bytes: int) -> int:
            nonlocal at
            begin, at = at, at + -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return begin

        self.ids, self.positions, self.slots = place(8 * tokens), place(8 * tokens), place(8 * tokens)
        self.last_rows = place(8 * seqs)
        self.query_start, self.table_start, self.kv_len = place(4 * (seqs + 1)), place(4 * seqs), place(4 * seqs)
        self.group_start, self.kv_begin = place(4 * (MAX_GROUPS + 1)), place(4 * seqs)
        self.group_table, self.group_len = place(4 * MAX_GROUPS), place(4 * MAX_GROUPS)
        self.tables = at


class _KnownTables:
    """Block tables as arrays, kept between steps: converting a Python list costs 30 ns per entry, each step anew.

    Keyed by the identity of the list. A list is held as long as it is known, so no other can take its identity.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Sequence[int], Int32s, int]] = {}
        self._used: set[int] = set()

    def row(self, table: Sequence[int], length: int) -> Int32s:
        """The first `length` entries of `table`."""
        name = id(table)
        self._used.add(name)
        known = self._rows.get(name)
        array, filled = (known[1], known[2]) if known is not None else (np.empty(0, np.int32), 0)
        if filled > length or (filled and table[filled - 1] != array[filled - 1]):
            filled = 0
        if filled < length:
            if length > len(table):
                raise ValueError(f"a block table of {len(table)} entries for {length} blocks of keys.")
            if length > len(array):
                array, old = np.empty(max(2 * len(array), length + 8), np.int32), array
                array[:filled] = old[:filled]
            array[filled:length] = table[filled:length]
            self._rows[name] = (table, array, length)
        return array[:length]

    def forget_unused(self) -> None:
        """Drop the tables that were not asked for since the last call, once there are many."""
        if len(self._rows) > 2 * len(self._used) + 64:
            self._rows = {name: row for name, row in self._rows.items() if name in self._used}
        self._used.clear()


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _leading_ones(counts: npt.NDArray[np.int64]) -> int:
    others = counts != 1
    return int(others.argmax()) if others.any() else len(counts)


def _padding(tokens: int, seqs: int) -> npt.NDArray[np.int64]:
    """Tokens of each padded sequence: one each while they last, or all of them in the first."""
    counts = np.zeros(seqs, dtype=np.int64)
    if tokens <= seqs:
        counts[:tokens] = 1
    else:
        counts[0] = tokens
    return counts
