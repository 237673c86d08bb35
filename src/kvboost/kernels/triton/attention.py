"""Paged attention of a packed batch on a GPU.

Sequences of one token that stand first in the row (decode) are served by one launch, all others by a second one whose
tiles hold several tokens; each launch may share the keys of a sequence out among programs and merge the results. Grids
depend on the shapes of the tensors only, never on what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvboost.kernels.cuda import prompt_attention
from kvboost.kernels.triton.attention_kernels import LOG2E, attention_kernel, merge_kernel
from kvboost.kernels.triton.early import early

MAX_SPLITS = 64
"""Merging reads `splits x head_dim` fp32 values per row and head; 64 of 128 are 32 KiB, about what one program holds."""

DECODE_PROGRAMS = 4
PROMPT_PROGRAMS = 3
"""Programs per multiprocessor that splitting aims at. Measured on an H200: 20 us for 16 x 1k keys with 4, 22 with 8."""

LIKELY = 0.6
"""The part of a step's sequences that are there: they are padded to 4 times as many as the next smaller size."""

ENOUGH_PROGRAMS = 1.5
"""From so many per multiprocessor on nothing is split: 64 x 1k keys take 42 us in one piece each and 60 in two."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Groups of decoding sequences that begin with the same blocks; device tensors of fixed shapes.

    The groups are the decoding rows cut in pieces: group g has the rows `query_start[g]:query_start[g+1]` (`[G+1]` int32),
    all of which see the first `kv_len[g]` keys (`[G]` int32) of the table at `table_start[g]` (`[G]` int32); 0 for rows that
    share nothing, and for padding, which has no rows. kv_begin `[S]` int32: that of each sequence's group; what it has
    alone begins there.
    """

    query_start: Tensor
    table_start: Tensor
    kv_len: Tensor
    kv_begin: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Who stands where in the packed row; device tensors of fixed shapes, so that a CUDA graph can be captured over them.

    positions `[T]` int32 or int64, ascending inside a sequence; query_start `[S+1]` int32: sequence s has the rows
    `query_start[s]:query_start[s+1]`; tables: int32, the blocks of all sequences, those of s from `table_start[s]` on
    (`[S]` int32); kv_len `[S]` int32: keys that exist. The first `decode_seqs` sequences may have one token: a
    sequence among them that has, and whose predecessors all have, is decoded. `prompts` tells whether any other
    sequence may have tokens. A sequence with kv_len 0 is padding: its rows become zeros. So rows are only left
    unwritten when no sequence owns them. shared: what the decoded sequences have in common, where that is worth a launch.
    """

    positions: Tensor
    query_start: Tensor
    tables: Tensor
    table_start: Tensor
    kv_len: Tensor
    decode_seqs: int
    prompts: bool
    shared: SharedKeys | None = None

    @property
    def num_seqs(self) -> int:
        return self.kv_len.shape[0]


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters of the attention kernel: rows and keys per tile, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: its tile, None for that of `prompt_attention.cu`; tiles for each key head; among how many programs keys are shared
    out; whether it serves sequences that are decoded, or all others."""

    tile: Tile | None
    tiles: int
    splits: int
    decode: bool


WITHOUT_TENSOR_CORES = Tile(16, 16, 4, 2)
"""For float32, and GPUs before compute capability 8.0, on which Triton multiplies element by element: larger tiles
spill their registers (600 bytes a thread at 32 x 32 in float32)."""

LARGE_SHARED_BYTES = 160_000
"""A100 and H100 give a program more, consumer GPUs 99 KiB: tiles for the former are pipelined deeper."""


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PackedBatch,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attend `query [T, Hq, D]` to the pool's `keys [blocks, block_size, Hkv, D]` and `values [.., Dv]` of one layer.

    A query at position p sees the keys at positions <= p, and > p - window. scaling defaults to `D ** -0.5`; softcap:
    `c * tanh(s / c)` on scaled scores; sinks `[Hq]`: logits without value in the softmax; slopes `[Hq]`: ALiBi,
    `slope * (key position - query position)` added to the scores. splits and tile override the choice made from
    the shapes. Returns `[T, Hq, Dv]`, `out` if given. Raises ValueError for shapes that do not fit together.
    """
    _check(query, keys, values, batch, sinks, slopes)
    if out is None:
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
    launch = _Launch(query, keys, values, batch, out, scaling, window, softcap, sinks, slopes)
    if batch.decode_seqs and batch.shared is not None and window is None:
        launch.decode_shared(batch.shared, tile, splits)
    elif batch.decode_seqs:
        launch.run(launch.decode_plan(tile, splits))
    if batch.prompts:
        launch.run(launch.prompt_plan(batch, query.shape[0], batch.num_seqs, tile, splits))
    return out


def decode_tile(query: Tensor, keys: Tensor, values: Tensor, seqs: int) -> Tile:
    """One token's heads by as many keys as leave room for several pipelined programs on a multiprocessor.

    Where two programs are all that a multiprocessor gets of `seqs` sequences, they have more warps and keys each: 64 x 1k keys take
    3 us less, 256 x 1k keys would take 9 us more. Where there are fewer, and keys are shared out, a program has a few tiles at
    most, and what counts is how few instructions it runs through, and has to fetch: more threads that do less each.
    """
    facts = _facts(query.device)
    if query.dtype == torch.float32 or not facts.tensor_cores:
        return WITHOUT_TENSOR_CORES
    rows = min(max(16, _padded(query.shape[1] // keys.shape[2])), 64)
    narrow = _widest(keys, values) <= 128
    programs = seqs * keys.shape[2] / facts.processors
    if rows == 16 and narrow and programs < ENOUGH_PROGRAMS:
        return Tile(16, 64, 4, 2)
    if rows == 16 and narrow and programs <= 2 and facts.shared_bytes >= LARGE_SHARED_BYTES:
        return Tile(16, 128, 4, 3)
    return Tile(rows, 64 if narrow else 32, 2 if rows == 16 else 4, 3)


def prompt_tile(query: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch) -> Tile:
    """As many rows as fill a tensor core's tile, fewer where the sequences are short or shared memory is small."""
    facts = _facts(query.device)
    if query.dtype == torch.float32 or not facts.tensor_cores:
        return WITHOUT_TENSOR_CORES
    rows_per_sequence = query.shape[0] * query.shape[1] / keys.shape[2] / batch.num_seqs
    if _widest(keys, values) <= 128:
        return Tile(64, 64, 4, 3 if rows_per_sequence > 1024 else 2)
    tall = facts.major >= 9 and facts.shared_bytes >= LARGE_SHARED_BYTES  # before Hopper, 128 rows of 256 spill
    return Tile(128, 32, 8, 2) if tall else Tile(64, 32, 8, 2)


class _Launch:
    """The arguments that the launches of one call share."""

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PackedBatch,
        out: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        self._query, self._keys, self._values, self._out = query, keys, values, out
        self._batch, self._window, self._sinks, self._slopes = batch, window, sinks, slopes
        self.group = query.shape[1] // keys.shape[2]
        scale = query.shape[2] ** -0.5 if scaling is None else scaling
        log2e = float(LOG2E.value)
        self._capped = softcap is not None
        self._cap = log2e * softcap if softcap is not None else 0.0
        self._scale = scale * log2e if softcap is None else 2.0 * scale * log2e / softcap

    def decode_plan(self, tile: Tile | None, splits: int | None) -> Plan:
        """For the leading sequences of one token."""
        seqs = self._batch.decode_seqs
        tile = tile or decode_tile(self._query, self._keys, self._values, seqs)
        return Plan(tile, seqs, splits or self._splits(seqs * self._heads(tile)[1], DECODE_PROGRAMS), decode=True)

    def prompt_plan(
        self, batch: PackedBatch, tokens: int, spare: int, tile: Tile | None, splits: int | None
    ) -> Plan:  # fmt: skip
        """For sequences of so many tokens together, in as few tiles as hold them and up to `spare` more."""
        if tile is None and self._on_hopper():
            tiles = prompt_attention.tiles_of(tokens, self.group, batch.num_seqs)
            full = max(-(-tokens * self.group // prompt_attention.ROWS), round(spare * LIKELY))
            there = full * self._keys.shape[2]
            processors = _facts(self._query.device).processors
            splits = splits or prompt_attention.splits_of(there, processors, MAX_SPLITS)
            return Plan(None, tiles, splits, decode=False)
        tile = tile or prompt_tile(self._query[:tokens], self._keys, self._values, batch)
        full, programs = -(-tokens // (tile.rows // min(self.group, tile.rows))), self._heads(tile)[1]
        splits = splits or self._splits((full + spare) * programs, PROMPT_PROGRAMS)
        return Plan(tile, full + batch.num_seqs, splits, decode=False)

    def run(self, plan: Plan) -> None:
        partial = self._partial(plan.splits) if plan.splits > 1 else (self._out, self._out)  # not read without splits
        self._attend(plan, self._batch, None, partial, 0, plan.splits)
        if plan.splits > 1:
            self._merge(plan.tiles if plan.decode else self._query.shape[0], partial, plan.splits, plan.decode)

    def decode_shared(self, shared: SharedKeys, tile: Tile | None, splits: int | None) -> None:
        """The decoding sequences: what groups share for all rows of a group at once, what each has alone, and both merged."""
        batch, seqs = self._batch, self._batch.decode_seqs
        groups = replace(
            batch, query_start=shared.query_start, table_start=shared.table_start, kv_len=shared.kv_len, decode_seqs=0
        )
        common, alone = self.prompt_plan(groups, seqs, 0, tile, splits), self.decode_plan(tile, splits)
        all_splits = common.splits + alone.splits
        partial = self._partial(all_splits)
        self._attend(common, groups, None, partial, 0, all_splits)
        self._attend(alone, batch, shared.kv_begin, partial, common.splits, all_splits)
        self._merge(seqs, partial, all_splits, True)

    def _on_hopper(self) -> bool:
        """Whether `prompt_attention.cu` serves; it is faster for whatever comes."""
        plain = self._window is None and self._sinks is None and self._slopes is None and not self._capped
        return (
            plain
            and self._scale > 0
            and prompt_attention.serves(self._query, self._keys, self._values, self._batch.positions)
        )

    def _heads(self, tile: Tile) -> tuple[int, int]:
        """Of a group in one tile, and programs for all heads."""
        heads = min(self.group, tile.rows)
        return heads, self._keys.shape[2] * -(-self.group // heads)

    def _splits(self, there: int, wanted: int) -> int:
        """For so many programs, if so many are wanted for each multiprocessor."""
        processors = _facts(self._query.device).processors
        return 1 if there >= ENOUGH_PROGRAMS * processors else min(max(wanted * processors // there, 1), MAX_SPLITS)

    def _partial(self, splits: int) -> tuple[Tensor, Tensor]:
        """Results of splits, and their log-sum-exp."""
        shape = (self._query.shape[0], self._query.shape[1], splits)
        partial = self._query.new_empty(*shape, self._values.shape[3], dtype=torch.float32)
        return partial, self._query.new_empty(shape, dtype=torch.float32)

    def _attend(
        self, plan: Plan, batch: PackedBatch, kv_begin: Tensor | None, partial: tuple[Tensor, Tensor], first_split: int,
        all_splits: int,
    ) -> None:  # fmt: skip
        query, keys, values, out, tile = self._query, self._keys, self._values, self._out, plan.tile
        if tile is None:
            among = None
            if all_splits > 1:
                among = prompt_attention.Splits(plan.splits, first_split, all_splits, *partial)
            prompt_attention.attend(query, keys, values, batch, out, self._scale, plan.tiles, among)
            return
        heads, programs = self._heads(tile)
        attention_kernel[(plan.tiles, programs, plan.splits)](
            query, keys, values, out, *partial,
            batch.positions, batch.query_start, batch.tables, batch.table_start, kv_begin, batch.kv_len,
            self._sinks, self._slopes,
            batch.num_seqs, batch.decode_seqs, plan.splits, first_split, all_splits, self._window or 0, self._scale,
            self._cap, query.shape[1], query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
            GROUP=self.group, HEADS=heads, DIM=keys.shape[3], DIM_V=values.shape[3],
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=_padded(keys.shape[3]), BLOCK_DV=_padded(values.shape[3]),
            PAGE=keys.shape[1], DECODE=plan.decode, SPLIT=all_splits > 1, WINDOWED=self._window is not None,
            CAPPED=self._capped, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.warps, num_stages=tile.stages, **early(query.device),
        )  # fmt: skip

    def _merge(self, rows: int, partial: tuple[Tensor, Tensor], splits: int, decode: bool) -> None:
        out, batch, dim_v = self._out, self._batch, self._values.shape[3]
        merge_kernel[(rows, self._query.shape[1])](
            out, *partial, batch.query_start, batch.num_seqs, batch.decode_seqs, splits, out.stride(0), out.stride(1),
            DIM_V=dim_v, BLOCK_DV=_padded(dim_v), BLOCK_SPLITS=_padded(splits, 2), DECODE=decode,
            num_warps=4, **early(self._query.device),
        )  # fmt: skip


def _padded(size: int, least: int = 16) -> int:
    """The next power of two: what a tile must measure."""
    return max(least, 1 << (size - 1).bit_length())


def _widest(keys: Tensor, values: Tensor) -> int:
    return _padded(max(keys.shape[3], values.shape[3]))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a launch must know of a GPU. shared_bytes: what one program may have; major: compute capability."""

    processors: int
    shared_bytes: int
    major: int

    @property
    def tensor_cores(self) -> bool:
        """Of a kind that Triton uses."""
        return self.major >= 8


@lru_cache
def _facts(device: torch.device) -> _Facts:
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)  # the former without stubs
    return _Facts(found.multi_processor_count, int(shared), found.major)


INTERPRETER = _Facts(processors=4, shared_bytes=232_448, major=9)
"""On a CPU, under the interpreter: so few processors that tests see both one split and several."""


def _check(
    query: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch, sinks: Tensor | None, slopes: Tensor | None
) -> None:
    """Shapes that do not fit would read foreign memory: refuse them here, where no device value is needed."""
    tokens, q_heads, dim = query.shape
    if keys.shape[:3] != values.shape[:3] or keys.shape[3] != dim or q_heads % keys.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}: they must "
            "share blocks and KV heads, query and key heads their dimension, and KV heads must divide query heads."
        )
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"query {query.dtype}, keys {keys.dtype} and values {values.dtype} must have one dtype.")
    if query.stride(2) != 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("the elements of a head must be adjacent in memory in query, keys and values.")
    if batch.positions.shape[0] != tokens:
        raise ValueError(f"{batch.positions.shape[0]} positions for {tokens} query rows.")
    if batch.query_start.shape[0] != batch.num_seqs + 1 or batch.table_start.shape[0] != batch.num_seqs:
        raise ValueError(
            f"query_start needs {batch.num_seqs + 1} and table_start {batch.num_seqs} entries, as kv_len has."
        )
    if batch.decode_seqs > min(batch.num_seqs, tokens):
        raise ValueError(f"decode_seqs={batch.decode_seqs} of {batch.num_seqs} sequences and {tokens} rows.")
    for name, vector in (("sinks", sinks), ("slopes", slopes)):
        if vector is not None and vector.shape != (q_heads,):
            raise ValueError(f"{name} must have one value per query head ({q_heads}), not {tuple(vector.shape)}.")
