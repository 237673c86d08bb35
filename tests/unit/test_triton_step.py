"""StepTensors packs what PagedStep would use, and TritonStep gives what PagedStep gives, interpreted on a CPU."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary

from triton_rig import close, interpreted

pytest.importorskip("triton")

from kvboost.attention.paged_torch import PagedStep, Span
from kvboost.attention.paged_triton import TritonStep
from kvboost.attention.step_tensors import StepTensors
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.cache.pool import KVPool

pytestmark = interpreted

CPU = torch.device("cpu")
FRESH_TOKENS = 40
"""What a fresh prompt must have here to use its own keys; the real limit would take the interpreter seconds."""

LAYERS = (LayerShape(2, 16, 2, 16), LayerShape(2, 24, 2, 16))
Q_HEADS = 6


@pytest.fixture(autouse=True)
def short_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.attention.paged_triton.FRESH_TOKENS", FRESH_TOKENS)


def pool_of(num_blocks: int, block_size: int = 16) -> KVPool:
    pool = KVPool(SlabLayout(LAYERS, block_size, "float32", 4), num_blocks, torch.float32, CPU)
    pool.slabs.normal_()
    return pool


def spans_of(*parts: tuple[int, int], block_size: int = 16) -> list[Span]:
    """Spans (start, count) over blocks that no other span has, in a scrambled order."""
    tables, at = [], 1
    for start, count in parts:
        size = -(-(start + count) // block_size)
        tables.append(list(range(at, at + size))[::-1])
        at += size
    return [Span(start, count, table) for (start, count), table in zip(parts, tables, strict=True)]


def tensors(**changes: Any) -> StepTensors:
    arguments = {
        "capacity_tokens": 4096,
        "capacity_seqs": 512,
        "capacity_blocks": 20000,
        "block_size": 16,
        "device": CPU,
    }
    return StepTensors(**{**arguments, **changes})


MIXES = {
    "decode": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "prompts": [(0, 20), (16, 3), (33, 2)],
    "mixed": [(7, 1), (31, 1), (0, 17), (20, 5)],
    "one": [(0, 1)],
}


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"softcap": 3.0}, {"s_aux": True}, {"scaling": 0.5}], ids=str
)
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_equals_the_torch_step(mix: str, options: dict[str, Any]) -> None:
    parts = MIXES[mix]
    spans = spans_of(*parts)
    options = {k: torch.randn(Q_HEADS) if k == "s_aux" else v for k, v in options.items()}
    ours, theirs = pool_of(40), pool_of(40)
    theirs.slabs.copy_(ours.slabs)
    step = TritonStep(ours, tensors().fill(spans), {3: 0, 5: 1})
    reference = PagedStep(theirs, spans, {3: 0, 5: 1})
    for index, shape in ((3, LAYERS[0]), (5, LAYERS[1])):
        module: Any = SimpleNamespace(layer_idx=index)
        q, k, v = random_qkv(sum(c for _, c in parts), shape)
        close(step.attend(module, q, k, v, **options)[0], reference.attend(module, q, k, v, **options)[0].double())
    assert step.num_attended == 2
    assert torch.equal(ours.slabs, theirs.slabs)


@pytest.mark.parametrize("padding", [(None, None), (16, 16), (40, 12)], ids=str)
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 3.0}], ids=str)
def test_sequences_that_share_blocks(
    options: dict[str, Any], prompts: bool, padding: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.attention.sharing.LEAST_SAVED_TOKENS", 1)
    common, others = [30, 11, 29], [12, 28]
    spans = [Span(48 + i, 1, [*common, 13 + i]) for i in range(3)] + [Span(20, 1, [20, 21])]
    spans += [Span(33 + 5 * i, 1, [*others, 17 + i]) for i in range(2)]
    spans += [Span(4, 3, [22]), Span(0, 18, [23, 24])] if prompts else []
    tokens, seqs = padding
    if tokens == 16 and prompts:
        tokens = 32
    ours, theirs = pool_of(40), pool_of(40)
    theirs.slabs.copy_(ours.slabs)
    inputs = tensors().fill(spans, pad_tokens_to=tokens, pad_seqs_to=seqs)
    assert inputs.batch.shared is not None and inputs.key[-1]
    step, reference = TritonStep(ours, inputs, {3: 0}), PagedStep(theirs, spans, {3: 0})
    real = sum(span.count for span in spans)
    q, k, v = random_qkv(tokens or real, LAYERS[0])
    module: Any = SimpleNamespace(layer_idx=3)
    out = step.attend(module, q, k, v, **options)[0]
    want = reference.attend(module, q[:, :, :real], k[:, :, :real], v[:, :, :real], **options)[0]
    close(out[:real], want.double())
    assert torch.equal(out[real:], torch.zeros_like(out[real:])), "padding sees nothing"
    assert torch.equal(ours.slabs, theirs.slabs)


def random_qkv(tokens: int, shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    """As a model hands them over: heads before tokens."""
    q = torch.randn(1, tokens, Q_HEADS, shape.k_dim).transpose(1, 2)
    k = torch.randn(1, tokens, shape.k_heads, shape.k_dim).transpose(1, 2)
    return q, k, torch.randn(1, tokens, shape.v_heads, shape.v_dim).transpose(1, 2)


@pytest.mark.parametrize("mix", MIXES)
def test_padding_changes_nothing(mix: str) -> None:
    parts = MIXES[mix]
    spans = spans_of(*parts)
    real = sum(c for _, c in parts)
    plain, padded = pool_of(40), pool_of(40)
    padded.slabs.copy_(plain.slabs)
    tokens, seqs = (8, 8) if mix in ("decode", "one") else (48, 8)
    module: Any = SimpleNamespace(layer_idx=0)
    q, k, v = random_qkv(tokens, LAYERS[0])
    inputs = tensors().fill(spans, pad_tokens_to=tokens, pad_seqs_to=seqs)
    out = TritonStep(padded, inputs, {0: 0}).attend(module, q, k, v)
    reference = TritonStep(plain, tensors().fill(spans), {0: 0})
    expected = reference.attend(module, q[:, :, :real], k[:, :, :real], v[:, :, :real])
    close(out[0, :real], expected[0].double())
    assert (out[0, real:] == 0).all(), "rows of padding are zeros"
    assert torch.equal(plain.slabs, padded.slabs), "padding writes nothing"


def test_a_long_fresh_prompt_uses_its_own_keys() -> None:
    """The table leads to blocks that hold NaN after the write, so only an attention over the step's own keys is right."""
    spans = spans_of((0, FRESH_TOKENS))
    module: Any = SimpleNamespace(layer_idx=0)
    q, k, v = random_qkv(FRESH_TOKENS, LAYERS[0])
    expected = PagedStep(pool_of(40), spans, {0: 0}).attend(module, q, k, v)
    pool, inputs = pool_of(40), tensors().fill(spans)
    inputs.slots.fill_(-1)  # nothing is stored
    pool.slabs.fill_(float("nan"))
    step = TritonStep(pool, inputs, {0: 0})
    close(step.attend(module, q, k, v)[0], expected[0].double())
    assert step.attend(module, q, k, v, s_aux=torch.zeros(Q_HEADS)).isnan().any(), "options go through the pages"


@pytest.mark.parametrize("rotated", [16, 8, None])
@pytest.mark.parametrize("parts", [MIXES["mixed"], [(0, FRESH_TOKENS)]], ids=["mixed", "fresh"])
def test_a_fused_product_equals_its_parts(parts: list[tuple[int, int]], rotated: int | None) -> None:
    spans = spans_of(*parts)
    fused, plain = pool_of(40), pool_of(40)
    plain.slabs.copy_(fused.slabs)
    tokens = sum(count for _, count in parts)
    q, k, v = random_qkv(tokens, LAYERS[0])
    qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], dim=1)
    rotary = None
    if rotated:
        angle = torch.randn(tokens, rotated // 2).repeat(1, 2)
        rotary = (angle.cos(), angle.sin())
        q, k = apply_partial_rotary(q, k, rotary[0][None], rotary[1][None])
    step = TritonStep(fused, tensors().fill(spans), {7: 0})
    out = step.attend_packed(7, qkv, Q_HEADS, rotary, sliding_window=11 if len(parts) > 1 else None)
    reference = PagedStep(plain, spans, {7: 0})
    module: Any = SimpleNamespace(layer_idx=7)
    expected = reference.attend(module, q, k, v, sliding_window=11 if len(parts) > 1 else None)
    close(out, expected[0].double())
    assert torch.equal(fused.slabs, plain.slabs)
    assert step.num_attended == 1


# -- what is sent ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(0, 5), st.integers(0, 9), st.sampled_from([8, 16, 32]),
)  # fmt: skip
def test_filled_arrays(parts: list[tuple[int, int]], more_seqs: int, more_tokens: int, size: int) -> None:
    parts.sort(key=lambda p: p[1] > 1)
    spans = spans_of(*parts, block_size=size)
    more_tokens = more_tokens if more_seqs else 0
    real = sum(s.count for s in spans)
    got = tensors(block_size=size).fill(
        spans, list(range(100, 100 + real)), pad_tokens_to=real + more_tokens, pad_seqs_to=len(spans) + more_seqs
    )
    positions = [p for s in spans for p in range(s.start, s.kv_len)]
    slots = [s.table[p // size] * size + p % size for s in spans for p in range(s.start, s.kv_len)]
    assert got.ids.tolist() == [*range(100, 100 + real)] + [0] * more_tokens
    assert got.batch.positions.tolist() == positions + [0] * more_tokens
    assert got.slots.tolist() == slots + [-1] * more_tokens
    assert got.batch.kv_len.tolist() == [s.kv_len for s in spans] + [0] * more_seqs
    ends = got.batch.query_start.tolist()
    assert ends[0] == 0 and ends[-1] == real + more_tokens, "every row belongs to a sequence"
    assert [b - a for a, b in pairwise(ends)][: len(spans)] == [s.count for s in spans]
    assert got.last_rows.tolist() == [end - 1 for end in ends[1:]]
    assert got.batch.prompts or got.last_rows.tolist() == list(range(len(got.ids))), "the runner then takes all rows"
    for span, at in zip(spans, got.batch.table_start.tolist(), strict=False):
        blocks = -(-span.kv_len // size)
        assert got.batch.tables[at : at + blocks].tolist() == list(span.table[:blocks])


def test_one_shape_has_one_place() -> None:
    made = tensors()
    one = made.fill(spans_of((5, 1), (80, 1)), pad_tokens_to=4, pad_seqs_to=4)
    other = made.fill(spans_of((200, 1), (1, 1), (9, 1)), pad_tokens_to=4, pad_seqs_to=4)
    assert one.key == other.key == made.fill([], pad_tokens_to=4, pad_seqs_to=4).key
    for a, b in (
        (one.ids, other.ids),
        (one.slots, other.slots),
        (one.last_rows, other.last_rows),
        *_arrays(one.batch, other.batch),
    ):
        assert a.data_ptr() == b.data_ptr() and a.shape == b.shape
        assert a.data_ptr() % 16 == 0, "or Triton compiles another variant"


def _arrays(a: Any, b: Any) -> list[tuple[Tensor, Tensor]]:
    return [(getattr(a, n), getattr(b, n)) for n in ("positions", "query_start", "tables", "table_start", "kv_len")]


def test_what_is_launched_depends_on_the_mix() -> None:
    def launches(parts: list[tuple[int, int]], **pad: int) -> tuple[int, bool]:
        batch = tensors().fill(spans_of(*parts), **pad).batch
        return batch.decode_seqs, batch.prompts

    assert launches(MIXES["decode"]) == (4, False)
    assert launches(MIXES["mixed"]) == (2, True)
    assert launches(MIXES["prompts"]) == (0, True)
    assert launches(MIXES["decode"], pad_tokens_to=8, pad_seqs_to=8) == (8, False)
    assert launches(MIXES["mixed"], pad_tokens_to=64, pad_seqs_to=8) == (8, True)
    assert launches([(0, 1), (0, 3)], pad_tokens_to=8, pad_seqs_to=8) == (8, True)
    assert launches(MIXES["prompts"], pad_tokens_to=64, pad_seqs_to=8) == (0, True)


def test_a_table_that_grows_is_followed() -> None:
    made = tensors()
    table = [7, 3]
    for start in range(16, 200):
        if start // 16 >= len(table):
            table.append(1000 + start)
        got = made.fill([Span(start, 1, table)])
        assert got.batch.tables[: len(table)].tolist() == table
    del table[5:]  # speculation gives blocks back
    assert made.fill([Span(70, 1, table)]).batch.tables[:5].tolist() == table
    table.append(77)
    assert made.fill([Span(90, 1, table)]).batch.tables[:6].tolist() == table
    fresh = [9, 8]
    assert made.fill([Span(20, 1, fresh)]).batch.tables[:2].tolist() == [9, 8]


def test_tables_of_requests_that_ended_are_let_go() -> None:
    made = tensors()
    for i in range(500):
        made.fill([Span(16, 1, [i, i + 1])])
    assert len(made._known._rows) < 100


@pytest.mark.parametrize(
    ("parts", "pad", "capacity", "words"),
    [
        ([(0, 9)], {}, {"capacity_tokens": 8}, "capacity_tokens"),
        ([(0, 1)] * 3, {}, {"capacity_seqs": 2}, "capacity_seqs"),
        ([(640, 1)], {}, {"capacity_blocks": 40}, "capacity_blocks"),
        ([(0, 9)], {"pad_tokens_to": 8}, {}, "cannot be padded"),
        ([(0, 9)], {"pad_tokens_to": 10}, {}, "pad_seqs_to"),
    ],
)
def test_limits_are_named(
    parts: list[tuple[int, int]], pad: dict[str, int], capacity: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tensors(**capacity).fill(spans_of(*parts), **pad)


def test_a_table_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="table of 1 entries for 2 blocks"):
        tensors().fill([Span(16, 1, [4])])
