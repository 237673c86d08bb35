"""The planner: what fits, what is spread how, and what is said."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.weights.plan import GIB, Demand, StreamPlan, plan_streaming, slots_of, spread
from kvboost.weights.streamer import _successors

LAYER_32B = 253_351_936
TABLE_32B = 1_557_135_360
"""Bytes of Qwen2.5-32B in AWQ with groups of 128: one decoder layer; the embedding, and the head."""


def test_the_8_gib_card_and_the_32b_model() -> None:
    """The case that streaming is made for, with the embedding read from the host: shared/WEIGHTS.md, section 2."""
    demand = Demand((LAYER_32B,) * 64, TABLE_32B, 4096 * 262_144, int(0.6 * GIB), TABLE_32B)
    plan = plan_streaming(demand, 8 * GIB, "vram_budget_gib", "RAM", 55e9)
    assert len(plan.resident) == 18 and plan.slots == 2
    assert plan.used_bytes <= 8 * GIB < plan.used_bytes + LAYER_32B
    assert plan.sweep_bytes == 46 * LAYER_32B == 11_654_189_056
    text = plan.describe()
    assert "18 of 64 layers resident, 46 streamed from RAM" in text
    assert "budget 8.00 GiB: 1.45 GiB embedding, head and norms, 4.25 GiB resident layers, 0.47 GiB in 2 slots" in text
    assert "10.85 GiB per sweep; at 55.0 GB/s at most 4.72 sweeps/s" in text
    assert "beside it on the host: 1.45 GiB embedding" in text


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    rest=st.integers(0, 2000),
    budget=st.integers(1, 50_000),
    slots=st.integers(2, 3),
)
def test_a_plan_keeps_to_its_budget_and_wastes_none(sizes: list[int], rest: int, budget: int, slots: int) -> None:
    demand = Demand(tuple(sizes), rest)
    try:
        plan = plan_streaming(demand, budget, "weights_budget_gib", slots=slots)
    except ConfigError:
        # Truly too little: not even slots for the largest of all layers.
        assert rest + slots * max(sizes) > budget or len(sizes) <= slots
        return
    assert plan.used_bytes <= budget
    assert sorted((*plan.resident, *plan.streamed)) == list(range(len(sizes)))
    if not plan.streamed:
        return
    assert len(plan.streamed) > plan.slots == slots
    assert demand.whole_bytes > budget, "nothing is streamed that could stay"
    fewer = spread(len(sizes), len(plan.streamed) - 1)
    if len(fewer) > slots:
        assert StreamPlan(demand, budget, fewer, slots, "", 0.0).used_bytes > budget


@given(total=st.integers(1, 80), data=st.data())
def test_streamed_layers_are_spread_evenly(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    chosen = spread(total, count)
    assert len(chosen) == count and list(chosen) == sorted(set(chosen))
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(streamed=st.integers(4, 100), slots=st.integers(2, 3))
def test_neighbours_have_different_slots(streamed: int, slots: int) -> None:
    taken = slots_of(streamed, slots)
    assert set(taken) == set(range(slots))
    seams = sum(a == b for a, b in zip(taken, (*taken[1:], taken[0]), strict=True))
    assert seams == (1 if slots == 2 and streamed % 2 else 0), "an odd circle has no two colours"


@given(streamed=st.integers(3, 60), slots=st.integers(2, 3))
def test_a_sweep_ends_as_it_began(streamed: int, slots: int) -> None:
    """After a pass each slot holds the layer that its first user in the next pass is: a CUDA graph relies on it."""
    if streamed <= slots:
        return
    taken = slots_of(streamed, slots)
    following = _successors(taken)
    holds = {taken[i]: i for i in range(slots)}
    for place in range(streamed):
        assert holds[taken[place]] == place
        holds[taken[place]] = following[place]
    assert holds == {slot: slot for slot in range(slots)}


def test_too_little_names_the_field_the_parts_and_the_least_that_works() -> None:
    demand = Demand((LAYER_32B,) * 64, TABLE_32B, GIB, GIB)
    with pytest.raises(ConfigError) as caught:
        plan_streaming(demand, 3 * GIB, "vram_budget_gib")
    text = str(caught.value)
    assert text.startswith("vram_budget_gib: 3.00 GiB is too little: 3.45 GiB always stay (weights outside of layers "
                           "1.45 GiB, KV 1.00 GiB, workspace 1.00 GiB)")  # fmt: skip
    match = re.search(r"Set vram_budget_gib=([\d.]+) at least", text)
    assert match is not None
    least = float(match[1])
    assert plan_streaming(demand, int(least * GIB), "vram_budget_gib").slots == 2
    with pytest.raises(ConfigError):
        plan_streaming(demand, int((least - 0.01) * GIB), "vram_budget_gib")


def test_a_layer_alone_in_its_slot_is_not_copied_again() -> None:
    plan = StreamPlan(Demand((10, 10, 10), 0), 25, (0, 1, 2), 2, "RAM", 1.0)
    assert plan.slot_of == (0, 1, 0)
    assert plan.sweep_bytes == 20
