"""Shared by the Triton tests: packed batches over a poisoned pool, and what attention must make of them.

`tests/unit` runs the kernels under Triton's interpreter on a CPU, `tests/gpu` compiled on a GPU; both from here.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvboost.attention.math import attend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest `|out - reference| / |reference|` (Euclidean): rounding of inputs' products in each dtype, nothing more."""


interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start (tests/conftest.py); on a GPU, tests/gpu runs these kernels compiled",
)


def _repair_interpreter() -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which NumPy 2.4 no longer converts to bounds of `range`; it cuts
    bf16 off where GPUs round, and multiplies the bits of bf16 as integers in a dot product."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        return torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        bf16 = str(a.dtype.scalar) == "bf16"
        return dot(self, *(self.cast_impl(x, triton.language.float32) if bf16 else x for x in (a, b)), *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = widened


_repair_interpreter()


@dataclass(frozen=True)
class Case:
    """A packed batch. Each sequence: (keys that exist, positions of its query rows)."""

    sequences: tuple[tuple[int, tuple[int, ...]], ...]
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dim_v: int | None = None
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    sinks: bool = False
    alibi: bool = False
    pad_seqs: int = 0
    pad_tokens: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    """Of the sequences being decoded, from the first on: so many `(sequences, blocks)` begin with the same blocks."""
    id: str = field(default="", compare=False)


def decode(*lengths: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Sequences of which the last token is being decoded."""
    return tuple((n, (n - 1,)) for n in lengths)


def chunk(start: int, count: int) -> tuple[int, tuple[int, ...]]:
    """`count` new tokens from position `start`."""
    return start + count, tuple(range(start, start + count))


@dataclass
class Inputs:
    query: Tensor
    keys: Tensor
    values: Tensor
    batch: Any
    options: dict[str, Any]
    tables: list[list[int]]


def build(
    case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, position_dtype: Any = torch.int64
) -> Inputs:
    """Random inputs. Slots of the pool that no sequence owns hold NaN, so that reading one cannot go unseen."""
    from kvboost.kernels.triton.attention import PackedBatch

    gen = torch.Generator().manual_seed(seed)
    dim_v = case.dim_v or case.dim
    size = case.block_size
    needed = [-(-length // size) for length, _ in case.sequences]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=gen) + 1).tolist()
    tables: list[list[int]] = []
    for count in needed:
        tables.append([order.pop() for _ in range(count)])
    first = 0
    for members, blocks in case.shared:
        for table in tables[first + 1 : first + members]:
            table[:blocks] = tables[first][:blocks]
        first += members
    elements = size * case.kv_heads * (case.dim + dim_v)
    slabs = torch.full((num_blocks, 3 * elements + 128), float("nan"), dtype=dtype)  # three layers; ours is the middle
    row_k, row_v = case.kv_heads * case.dim, case.kv_heads * dim_v
    stride = slabs.stride(0)
    keys = slabs.as_strided((num_blocks, size, case.kv_heads, case.dim), (stride, row_k, case.dim, 1), elements)
    values = slabs.as_strided(
        (num_blocks, size, case.kv_heads, dim_v), (stride, row_v, dim_v, 1), elements + size * row_k
    )
    for (length, _), table in zip(case.sequences, tables, strict=True):
        for i, block in enumerate(table):
            used = min(size, length - i * size)
            keys[block, :used] = torch.randn(used, case.kv_heads, case.dim, generator=gen).to(dtype)
            values[block, :used] = torch.randn(used, case.kv_heads, dim_v, generator=gen).to(dtype)
    slabs_on = slabs.to(device)
    keys = slabs_on.as_strided(keys.shape, keys.stride(), keys.storage_offset())
    values = slabs_on.as_strided(values.shape, values.stride(), values.storage_offset())

    positions = [p for _, ps in case.sequences for p in ps] + [0] * case.pad_tokens
    counts = [len(ps) for _, ps in case.sequences] + _padding_counts(case)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    widths = [len(t) for t in tables] + [0] * case.pad_seqs
    table_start = [sum(widths[:i]) for i in range(len(widths))]
    lengths = [length for length, _ in case.sequences] + [0] * case.pad_seqs
    # A hand-over from the model: heads before tokens, as a transposed view of [T, Hq, D].
    query = torch.randn(len(positions), case.q_heads, case.dim, generator=gen).to(dtype).to(device)
    singles = 0
    while singles < len(counts) and counts[singles] == 1:
        singles += 1
    ints = {"dtype": torch.int32, "device": device}
    batch = PackedBatch(
        positions=torch.tensor(positions, dtype=position_dtype, device=device),
        query_start=torch.tensor(starts, **ints),
        tables=torch.tensor([b for t in tables for b in t] or [0], **ints),
        table_start=torch.tensor(table_start, **ints),
        kv_len=torch.tensor(lengths, **ints),
        decode_seqs=singles,
        prompts=any(count > 1 for count in counts),
        shared=_shared(case, singles, table_start, ints) if case.shared else None,
    )
    options: dict[str, Any] = {"scaling": case.scaling, "window": case.window, "softcap": case.softcap}
    if case.sinks:
        options["sinks"] = torch.randn(case.q_heads, generator=gen).to(dtype).to(device)
    if case.alibi:
        options["slopes"] = torch.tensor([2.0 ** -(i + 1) for i in range(case.q_heads)], device=device)
    return Inputs(query, keys, values, batch, options, tables)


def _shared(case: Case, singles: int, table_start: list[int], ints: dict[str, Any]) -> Any:
    """Groups as `StepTensors` makes them: those that share, one for all other decoded rows, and two of padding."""
    from kvboost.kernels.triton.attention import SharedKeys

    starts, tables, lengths = [0], [], []
    kv_begin = [0] * (len(case.sequences) + case.pad_seqs)
    for members, blocks in case.shared:
        for seq in range(starts[-1], starts[-1] + members):
            kv_begin[seq] = blocks * case.block_size
        tables.append(table_start[starts[-1]])
        lengths.append(blocks * case.block_size)
        starts.append(starts[-1] + members)
    starts, tables, lengths = [*starts, singles, singles, singles], [*tables, 0, 0, 0], [*lengths, 0, 0, 0]
    return SharedKeys(*(torch.tensor(numbers, **ints) for numbers in (starts, tables, lengths, kv_begin)))


def _padding_counts(case: Case) -> list[int]:
    if case.pad_tokens <= case.pad_seqs:
        return [1] * case.pad_tokens + [0] * (case.pad_seqs - case.pad_tokens)
    return [case.pad_tokens] + [0] * (case.pad_seqs - 1)


def expected(case: Case, inputs: Inputs) -> Tensor:
    """`[T, Hq, Dv]` in float64 from dense tensors; rows of padding are zeros."""
    wide = torch.float64
    dim_v = case.dim_v or case.dim
    out = torch.zeros(inputs.query.shape[0], case.q_heads, dim_v, dtype=wide, device=inputs.query.device)
    row = 0
    for (length, positions), table in zip(case.sequences, inputs.tables, strict=True):
        k = inputs.keys[table].flatten(0, 1)[:length].to(wide).transpose(0, 1)[None]
        v = inputs.values[table].flatten(0, 1)[:length].to(wide).transpose(0, 1)[None]
        q = inputs.query[row : row + len(positions)].to(wide).transpose(0, 1)[None]
        p = torch.tensor(positions, device=q.device)[:, None]
        at = torch.arange(length, device=q.device)[None]
        seen = at <= p
        if case.window is not None:
            seen &= at > p - case.window
        mask = torch.zeros(seen.shape, dtype=wide, device=q.device).masked_fill_(~seen, float("-inf"))[None, None]
        if case.alibi:
            bias = inputs.options["slopes"].to(wide)[:, None, None] * (at - p).to(wide)
            mask = mask + bias[None]
            k, v = (x.repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
        result = attend(
            q, k, v, mask=mask, scaling=case.scaling, softcap=case.softcap, sinks=inputs.options.get("sinks")
        )
        out[row : row + len(positions)] = result[0].transpose(0, 1)
        row += len(positions)
    return out


def check(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, **overrides: Any) -> None:
    """Run the kernel on a poisoned output and compare with the reference."""
    from kvboost.kernels.triton.attention import paged_attention

    inputs = build(case, dtype, device, seed)
    out = inputs.query.new_full((inputs.query.shape[0], case.q_heads, case.dim_v or case.dim), float("nan"))
    paged_attention(inputs.query, inputs.keys, inputs.values, inputs.batch, out=out, **inputs.options, **overrides)
    close(out, expected(case, inputs), case)


def close(out: Tensor, reference: Tensor, note: object = "") -> None:
    """Equal up to the rounding of the dtype of `out`, over all and in the worst row."""
    tolerance = TOLERANCE[out.dtype]
    error = (out.double() - reference).flatten(1).norm(dim=1)
    scale = reference.flatten(1).norm(dim=1)
    assert torch.isfinite(error).all(), (
        f"not finite in rows {torch.nonzero(~torch.isfinite(error)).flatten().tolist()}: {note}"
    )
    worst = float((error / scale.clamp_min(1e-3)).max())
    assert worst <= tolerance, f"relative error {worst:.2e} in one row, {tolerance:.0e} allowed: {note}"


CASES = (
    Case(decode(1), id="one key"),
    Case(decode(1, 16, 17, 33, 130), id="decode lengths"),
    Case(decode(37, 5, 300), q_heads=7, kv_heads=1, dim=80, id="mqa, heads of 80, group of 7"),
    Case(decode(65, 19), q_heads=3, kv_heads=3, dim=128, id="mha"),
    Case(decode(50, 21), q_heads=4, kv_heads=2, dim=256, id="heads of 256"),
    Case(decode(70, 9), dim=96, dim_v=64, id="values narrower than keys"),
    Case(decode(100, 31, 8), window=13, id="decode window"),
    Case(decode(40, 3), softcap=5.0, scaling=0.3, id="decode softcap"),
    Case(decode(90, 2), sinks=True, id="decode sinks"),
    Case(decode(77, 6), alibi=True, id="decode alibi"),
    Case(decode(30, 18), block_size=8, id="blocks of 8"),
    Case(decode(150, 129), block_size=128, id="blocks of 128"),
    Case(decode(9, 20), pad_seqs=2, pad_tokens=2, sinks=True, id="padded decode"),
    Case((chunk(0, 23),), id="fresh prompt"),
    Case((chunk(45, 19), chunk(0, 5)), id="chunks"),
    Case((chunk(33, 7), chunk(7, 40)), q_heads=7, kv_heads=1, dim=80, id="chunks, group of 7"),
    Case((chunk(20, 30), chunk(61, 3)), window=11, id="chunk window"),
    Case((chunk(20, 6),), softcap=4.0, window=9, id="softcap and window"),
    Case((chunk(20, 9), chunk(0, 4)), sinks=True, window=12, id="sinks and window"),
    Case((chunk(17, 8),), alibi=True, dim=80, id="chunk alibi"),
    Case((chunk(31, 4), chunk(2, 4), chunk(64, 4)), q_heads=6, kv_heads=2, id="speculation"),
    Case(((100, (3, 4, 17, 50, 51, 98)), (40, (0, 39))), id="scattered positions"),
    Case((*decode(20, 65), chunk(30, 12), chunk(0, 9)), id="decode beside prompts"),
    Case((*decode(20, 65), chunk(30, 12)), pad_seqs=3, pad_tokens=7, sinks=True, id="padded mixed"),
    Case((chunk(9, 10),), q_heads=40, kv_heads=1, dim=64, id="more heads than a tile has rows"),
    Case((chunk(13, 10), chunk(0, 18)), dim=192, dim_v=128, id="DeepSeek's heads"),
)


def case_id(case: Case) -> str:
    return case.id or repr(case)


ROTARY_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
"""Transformers' parameters of the rotary types whose frequencies do not change as a sequence grows."""


def check_best_tokens(logits: Tensor) -> None:
    """The greedy choice is that of `torch.max`, on any device."""
    from kvboost.kernels.triton.greedy import best_tokens

    values, tokens = logits.float().max(-1)
    found = best_tokens(logits)
    assert found.dtype == torch.int32 and found.device == logits.device
    assert found[0].tolist() == tokens.tolist()
    assert torch.equal(found[1].view(torch.float32).nan_to_num(7e7), values.nan_to_num(7e7))
