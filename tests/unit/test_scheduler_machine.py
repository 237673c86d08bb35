"""Random operations on the scheduler, the pool and the prefix keys; `Rig` checks every invariant after each one.

`KVBOOST_LONG=1` runs 200,000 operations through hypothesis and 200,000 through a plain random driver.
"""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler_rig import SALTS, Rig

LONG = os.environ.get("KVBOOST_LONG") == "1"

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=20)
small = st.integers(0, 7)


class SchedulerMachine(RuleBasedStateMachine):
    rig: Rig

    @initialize(
        num_blocks=st.integers(2, 24), block_size=st.sampled_from([1, 2, 4]), max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 24), share=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, share: bool) -> None:
        self.rig = Rig(num_blocks, block_size, max_num_seqs, budget, share=share)

    @rule(
        suffix=tokens, like=small, keep=st.integers(0, 30), salt=st.sampled_from(SALTS), extra=st.integers(1, 9),
        prefill_only=st.booleans(), pin=st.booleans(), prompt_logprobs=st.booleans(), copies=st.integers(1, 3),
    )  # fmt: skip
    def add(
        self, suffix: list[int], like: int, keep: int, salt: str | None, extra: int, prefill_only: bool, pin: bool,
        prompt_logprobs: bool, copies: int,
    ) -> None:  # fmt: skip
        prompt_logprobs = prompt_logprobs and not prefill_only
        for _ in range(copies):
            self.rig.add(
                suffix, like=like, keep=keep, salt=salt, extra=extra, prefill_only=prefill_only,
                pin=pin and prefill_only, prompt_logprobs=prompt_logprobs,
            )  # fmt: skip

    @rule(times=st.integers(1, 4))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.rig.step()

    @rule(which=small)
    def step_with_abort(self, which: int) -> None:
        self.rig.step(abort=which)

    @rule(written=small, abort=st.none() | small)
    def failing_step(self, written: int, abort: int | None) -> None:
        self.rig.failing_step(written, abort=abort)

    @rule(which=small)
    def abort(self, which: int) -> None:
        self.rig.abort(which)

    @rule(which=small)
    def unpin(self, which: int) -> None:
        self.rig.unpin(which)

    @rule()
    def forget_cached(self) -> None:
        self.rig.forget_cached()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=2000 if LONG else 60, stateful_step_count=100 if LONG else 30, deadline=None, derandomize=not LONG,
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip
TestSchedulerMachine = pytest.mark.timeout(1800)(TestSchedulerMachine)  # type: ignore[misc]


def random_operation(rig: Rig, rng: random.Random) -> None:
    """One operation; the mix keeps a queue of a few requests and a full pool."""
    choice = rng.random()
    if choice < 0.25 and len(rig.requests) < 12:
        prefill_only = rng.random() < 0.2
        arguments = dict(
            suffix=rng.choices([1, 2], k=rng.randint(1, 20)), like=rng.randrange(8), keep=rng.choice([0, 4, 8, 12, 30]),
            salt=rng.choice(SALTS[: rng.randint(1, 3)]), extra=rng.randint(1, 12), prefill_only=prefill_only,
            pin=prefill_only and rng.random() < 0.5, prompt_logprobs=not prefill_only and rng.random() < 0.1,
        )  # fmt: skip
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            rig.add(**arguments)  # type: ignore[arg-type]
    elif choice < 0.90:
        rig.step(abort=rng.randrange(12) if rng.random() < 0.02 else None)
    elif choice < 0.92:
        rig.failing_step(rng.randrange(4), abort=rng.randrange(12) if rng.random() < 0.2 else None)
    elif choice < 0.96:
        rig.abort(rng.randrange(12))
    elif choice < 0.998:
        rig.unpin(rng.randrange(4))
    else:
        rig.forget_cached()


def random_rig(rng: random.Random) -> Rig:
    return Rig(
        num_blocks=rng.randint(4, 32), block_size=rng.choice([1, 2, 4]), max_num_seqs=rng.randint(1, 10),
        budget=rng.choice([1, 2, 3, 5, 8, 16, 40]), share=rng.random() < 0.9,
    )  # fmt: skip


@pytest.mark.timeout(1800)
def test_long_random_runs_keep_every_invariant() -> None:
    operations, runs = (200_000, 200) if LONG else (6_000, 30)
    seen = sum_of = None
    for run in range(runs):
        rng = random.Random(run)
        rig = random_rig(rng)
        for _ in range(operations // runs):
            random_operation(rig, rng)
        rig.drain()
        sum_of = rig.seen if seen is None else seen + rig.seen
        seen = sum_of
    assert seen is not None
    if LONG:
        print(dict(seen))
    # The mix must reach what it is there to test.
    for event in (
        "cached blocks", "preempted", "finished after a preemption", "shared in the same step", "failed steps",
        "aborted", "pinned blocks", "unpinned", "done without compute", "refused",
    ):  # fmt: skip
        assert seen[event] > 10, f"hardly any {event}: {dict(seen)}"
