"""Paged attention in Triton, interpreted on a CPU, equals the reference over dense tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_rig import CASES, Case, build, case_id, check, chunk, close, decode, expected, interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.attention import Tile, paged_attention

pytestmark = interpreted

SMALL = Tile(rows=16, keys=32, warps=4, stages=2)
"""Tiles so small that short sequences need several."""


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_reference(case: Case) -> None:
    check(case, torch.float32)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", CASES[1::4], ids=case_id)
def test_the_number_of_splits_and_the_tile_change_nothing(case: Case, splits: int) -> None:
    check(case, torch.float32, splits=splits, tile=SMALL)


@pytest.mark.parametrize("case", [CASES[1], CASES[14], CASES[22]], ids=case_id)
def test_half_precision(case: Case) -> None:
    check(case, torch.float16)


SHARING = [
    Case(decode(70, 66, 90, 65), shared=((4, 4),)),
    Case(decode(40, 33, 100, 81, 82, 20, 1), shared=((2, 2), (3, 5)), pad_seqs=2, pad_tokens=2),
    Case((*decode(*range(50, 76)), chunk(5, 9), chunk(0, 3)), shared=((20, 3),), q_heads=6, kv_heads=1, sinks=True),
    Case(decode(64, 65, 66), shared=((3, 3),), softcap=3.0, q_heads=2, kv_heads=2, dim=32),
    Case(decode(64, 65, 66), shared=((3, 3),), alibi=True),
    Case(decode(64, 65, 66), shared=((3, 3),), window=20),  # takes the other way
    Case((*decode(97), chunk(3, 5)), shared=((1, 6),), pad_seqs=2, pad_tokens=5),
]


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("case", SHARING, ids=lambda case: f"{case.shared}")
def test_keys_that_sequences_share(case: Case, splits: int | None) -> None:
    check(case, torch.float32, splits=splits, tile=None if splits is None else SMALL)


sequences = st.lists(
    st.integers(1, 70).flatmap(
        lambda length: st.tuples(
            st.just(length),
            st.one_of(
                st.just((length - 1,)),
                st.sets(st.integers(0, length - 1), min_size=1, max_size=9).map(lambda s: tuple(sorted(s))),
            ),
        )
    ),
    min_size=1,
    max_size=4,
).map(lambda found: tuple(sorted(found, key=lambda s: len(s[1]) > 1)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2]))
    soft = draw(st.sampled_from([None, None, 3.0]))
    alibi = draw(st.booleans()) and soft is None
    pad_seqs = draw(st.integers(0, 2))
    return Case(
        draw(sequences),
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 24, 64])),
        dim_v=draw(st.sampled_from([None, 16, 40])),
        block_size=draw(st.sampled_from([8, 16, 32])),
        window=draw(st.sampled_from([None, 1, 7, 33])),
        softcap=soft,
        sinks=draw(st.booleans()) and not alibi,
        alibi=alibi,
        pad_seqs=pad_seqs,
        pad_tokens=draw(st.integers(0, 3)) if pad_seqs else 0,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), splits=st.sampled_from([1, 2, 5]), seed=st.integers(0, 99))
def test_random_batches(case: Case, splits: int, seed: int) -> None:
    check(case, torch.float32, seed=seed, splits=splits, tile=SMALL)


def test_positions_may_be_32_bits_wide() -> None:
    case = CASES[22]
    inputs = build(case, torch.float32, position_dtype=torch.int32)
    close(paged_attention(inputs.query, inputs.keys, inputs.values, inputs.batch), expected(case, inputs))


def test_query_and_output_may_be_views() -> None:
    case = CASES[22]
    inputs = build(case, torch.float32)
    query = inputs.query.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.full((query.shape[0], case.q_heads + 1, case.dim * 2), float("nan"))
    paged_attention(query, inputs.keys, inputs.values, inputs.batch, out=out[:, 1:, : case.dim])
    close(out[:, 1:, : case.dim], expected(case, inputs))
    assert out[:, 0].isnan().all() and out[:, :, case.dim :].isnan().all()


def test_rows_of_no_sequence_are_left_alone() -> None:
    case = CASES[22]
    inputs = build(case, torch.float32)
    query = torch.cat((inputs.query, torch.full_like(inputs.query[:5], float("nan"))))
    positions = torch.cat((inputs.batch.positions, torch.full((5,), 10**6)))
    batch = _with(inputs.batch, positions=positions)
    for splits in (1, 4):
        out = torch.full_like(query, 7.0)
        paged_attention(query, inputs.keys, inputs.values, batch, out=out, splits=splits)
        close(out[:-5], expected(case, inputs))
        assert (out[-5:] == 7.0).all()


def test_a_static_launch_serves_other_lengths() -> None:
    """What a CUDA graph replays: same shapes, other contents; here two of the four sequences are padding at first."""
    first = Case(tuple((n, (n - 1,)) for n in (5, 90)), pad_seqs=2, pad_tokens=2)
    second = Case(tuple((n, (n - 1,)) for n in (120, 1, 64, 17)))
    for case in (first, second):
        inputs = build(case, torch.float32)
        batch = _with(inputs.batch, decode_seqs=4, prompts=True)  # both launches, whoever comes
        out = torch.full_like(inputs.query, float("nan"))
        paged_attention(inputs.query, inputs.keys, inputs.values, batch, out=out, splits=4)
        close(out, expected(case, inputs))


def _with(batch: object, **changes: object) -> object:
    from dataclasses import replace

    return replace(batch, **changes)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(1, 5, 64)}, "KV heads must divide"),
        ({"query": torch.zeros(1, 4, 32)}, "dimension"),
        ({"query": torch.zeros(1, 4, 64, dtype=torch.float16)}, "one dtype"),
        ({"query": torch.zeros(2, 4, 64)}, "1 positions for 2 query rows"),
        ({"query": torch.zeros(1, 4, 128)[..., ::2]}, "adjacent"),
        ({"sinks": torch.zeros(3)}, "sinks must have one value per query head"),
        ({"slopes": torch.zeros(4, 1)}, "slopes must have one value per query head"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    inputs = build(CASES[0], torch.float32)
    arguments = {"query": inputs.query, "keys": inputs.keys, "values": inputs.values, "batch": inputs.batch, **change}
    with pytest.raises(ValueError, match=words):
        paged_attention(**arguments)
