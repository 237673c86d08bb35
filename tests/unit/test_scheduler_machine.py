"""Random operations on the scheduler, the pool and the prefix keys; `Rig` checks every invariant after each one.

`KVBOOST_LONG=1` runs 200,000 operations through hypothesis and 200,000 through a plain random driver.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from scheduler_rig import SALTS, Rig

LONG = os.environ.get("KVBOOST_LONG") == "1"

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=20)
small = st.integers(0, 7)

TROUBLE = (
    *["abort"] * 7, *["unpin"] * 4, *["step with abort"] * 2, "failing step", "failing step ahead", "failing step with abort",
    "forget cached",
)  # fmt: skip

TOTAL: Counter[str] = Counter()
"""What the machine has done in all its examples; operations without the draining."""


class SchedulerMachine(RuleBasedStateMachine):
    rig: Rig

    @initialize(
        num_blocks=st.integers(4, 24), block_size=st.sampled_from([1, 2, 4]), max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 24), share=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, share: bool) -> None:
        self.rig = Rig(num_blocks, block_size, max_num_seqs, budget, share=share)

    @rule(
        suffix=tokens, like=small, keep=st.integers(0, 30), salt=st.sampled_from(SALTS), extra=st.integers(1, 12),
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

    @rule(times=st.integers(1, 4), ahead=st.integers(0, 3))
    def steps(self, times: int, ahead: int) -> None:
        for _ in range(times):
            self.rig.step(ahead=ahead)

    @rule(question=tokens, like=small, turns=st.integers(1, 3), times=st.integers(0, 6))
    def crowd(self, question: list[int], like: int, turns: int, times: int) -> None:
        """A few continuations of one conversation, all at once, with long answers: a full pool."""
        for turn in range(turns):
            self.rig.add([*question, *[2] * turn], like=like, keep=30, extra=20)
        for _ in range(times):
            self.rig.step()

    # One rule for all that destroys: as rules of their own they would keep the pool empty.
    @rule(what=st.sampled_from(TROUBLE), which=small, written=small)
    def trouble(self, what: str, which: int, written: int) -> None:
        if what == "abort":
            self.rig.abort(which)
        elif what == "unpin":
            self.rig.unpin(which)
        elif what == "step with abort":
            self.rig.step(abort=which)
        elif what == "failing step":
            self.rig.failing_step(written)
        elif what == "failing step ahead":
            self.rig.step(ahead=1 + written % 2, breaks=True)
        elif what == "failing step with abort":
            self.rig.failing_step(written, abort=which)
        else:
            self.rig.forget_cached()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            operations = self.rig.seen["operations"]
            self.rig.drain()
            TOTAL.update({**self.rig.seen, "operations": operations})


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=2400 if LONG else 240, stateful_step_count=60 if LONG else 30, deadline=None, derandomize=not LONG,
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip
TestSchedulerMachine = pytest.mark.timeout(1800)(TestSchedulerMachine)  # type: ignore[misc]


def test_the_machine_reached_what_it_is_there_to_test() -> None:
    """After the machine, in the same process; skipped when that was not run."""
    if not TOTAL:
        pytest.skip("the machine did not run here")
    if LONG:
        print(dict(TOTAL))
    assert_reached(TOTAL, 200_000 if LONG else 1_500, 3)


def assert_reached(seen: Counter[str], operations: int, times: int) -> None:
    assert seen["operations"] >= operations
    for event in (
        "cached blocks", "copied blocks", "preempted", "finished after a preemption", "shared in the same step", "failed steps",
        "aborted", "pinned blocks", "unpinned", "done without compute", "refused", "begun ahead",
        "prompts begun ahead", "failed ahead",
    ):  # fmt: skip
        assert seen[event] >= times, f"hardly any {event}: {dict(seen)}"


def random_operation(rig: Rig, rng: random.Random) -> None:
    """One operation; the mix keeps a queue of a few requests and a full pool."""
    choice = rng.random()
    if choice < 0.08 and len(rig.requests) < 12:
        rig.add(rng.choices([1, 2], k=rng.randint(1, 3)), like=-1, keep=30, extra=rng.randint(4, 25))
        return
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
        rig.step(abort=rng.randrange(12) if rng.random() < 0.02 else None, ahead=rng.choice([0, 0, 1, 3]))
    elif choice < 0.91:
        rig.step(ahead=rng.choice([1, 2]), breaks=True)
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
    seen: Counter[str] = Counter()
    for run in range(runs):
        rng = random.Random(run)
        rig = random_rig(rng)
        while rig.seen["operations"] < operations // runs:
            random_operation(rig, rng)
        rig.drain()
        seen.update(rig.seen)
    if LONG:
        print(dict(seen))
    assert_reached(seen, operations, 10)


def test_a_copy_that_a_failed_step_did_not_make_is_not_found() -> None:
    """A request takes a copy of a known tail, is aborted before its step is over, and the step fails before it copies."""
    state = SchedulerMachine()
    state.start(num_blocks=6, block_size=4, max_num_seqs=1, budget=1, share=True)
    state.crowd(like=0, question=[1], times=0, turns=1)
    state.steps(ahead=0, times=1)
    state.trouble(what="abort", which=0, written=0)
    state.crowd(like=0, question=[1], times=0, turns=1)
    state.trouble(what="failing step with abort", which=0, written=0)
    state.crowd(like=0, question=[1], times=1, turns=1)
    state.rig.drain()
