"""What a step holds, who waits, who gives way."""

from __future__ import annotations

from kvboost.cache.blocks import BlockPool
from kvboost.cache.prefix import extend_keys, root_key
from kvboost.engine.request import Request, Status
from kvboost.engine.sampling_params import SamplingParams
from kvboost.engine.scheduler import Scheduler, StepPlan


class Steps:
    """A scheduler whose model answers 100, 101, 102, ... and ends a request at its `max_total_tokens`."""

    def __init__(self, num_blocks: int, block_size: int = 4, max_num_seqs: int = 8, budget: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.pool, block_size, max_num_seqs, budget)

    def add(self, name: str, prompt: list[int], *, total: int | None = None, salt: str | None = None,
            prefill_only: bool = False, pin: bool = False, prompt_logprobs: int | None = None) -> Request:  # fmt: skip
        request = Request(
            id=name, prompt_ids=prompt, root=root_key(b"weights", salt), prefill_only=prefill_only, pin=pin,
            params=SamplingParams(prompt_logprobs=prompt_logprobs), max_total_tokens=total or len(prompt) + 50,
        )  # fmt: skip
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan)
        for work in plan.work:
            if work.sample:
                self.scheduler.append_token(work.request, 100 + work.request.num_output)
                if len(work.request.tokens) >= work.request.max_total_tokens:
                    self.scheduler.finish(work.request, "length")
            elif work.request.prefill_only and work.request.num_computed == len(work.request.tokens):
                self.scheduler.finish(work.request, "stop")
        for request in plan.done:
            self.scheduler.finish(request, "stop")
        self.scheduler.check()
        return plan


def planned(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(id, start, count) of each piece of work."""
    return [(w.request.id, w.start, w.count) for w in plan.work]


def test_a_prompt_short_of_room_is_not_overtaken() -> None:
    """Found by review: a younger request that shared the oldest one's blocks took the last block, and then
    neither it nor the half-computed prompt before it could ever go on ("alone does not fit the pool")."""
    steps = Steps(num_blocks=10, block_size=1, budget=4)
    steps.add("oldest", [1, 2, 3, 4], total=7)
    steps.step()
    steps.add("prompt", [11, 12, 13, 14, 15], total=6)
    assert planned(steps.step()) == [("oldest", 4, 1), ("prompt", 0, 3)]
    steps.add("younger", [1, 2, 3, 4, 100, 101, 9], total=8)
    assert planned(steps.step()) == [("oldest", 5, 1)]
    assert planned(steps.step())[0] == ("prompt", 3, 2)


def test_a_step_that_breaks_ends_requests_that_needed_no_compute_in_it() -> None:
    """Found by the state machine: they stayed in `running` for ever, and had been found in blocks never written."""
    steps = Steps(num_blocks=8)
    computed = steps.add("computed", [1, 2, 3, 4], prefill_only=True)
    twin = steps.add("twin", [1, 2, 3, 4], prefill_only=True, pin=True)
    plan = steps.scheduler.schedule()
    assert planned(plan) == [("computed", 0, 4)] and plan.done == [twin]
    assert steps.scheduler.fail(plan) == [computed, twin]
    assert not steps.scheduler.has_work() and steps.pool.num_cached == 0 and steps.pool.num_referenced == 0


def test_a_request_aborted_inside_a_step_that_breaks_leaves_no_key() -> None:
    """Found by the state machine: the keys were looked up through its block table, which the abort had emptied."""
    steps = Steps(num_blocks=8)
    request = steps.add("a", [1, 2, 3, 4, 5])
    plan = steps.scheduler.schedule()
    steps.scheduler.finish(request, "abort")
    steps.scheduler.fail(plan)
    assert steps.pool.num_cached == 0


def request_keys(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(b"weights"), tokens, 4)
    return keys


def test_a_pin_holds_the_block_that_is_found() -> None:
    """Found by the state machine: it held its own copy, which no key pointed at, and the found one was evicted."""
    steps = Steps(num_blocks=8, budget=4)
    steps.add("first", [1, 2, 3, 4, 5, 6, 7], total=20)
    steps.step()
    steps.add("pin", [1, 2, 3, 4, 5, 6, 7, 100], prefill_only=True, pin=True)
    steps.step()
    for _ in range(3):
        steps.step()
    assert len(steps.scheduler.pinned["pin"]) == 2
    assert steps.scheduler.pinned["pin"] == steps.pool.find(request_keys([1, 2, 3, 4, 5, 6, 7, 100]), 2)


def test_nothing_is_pinned_when_nothing_can_be_found() -> None:
    """Found by the state machine: with prefix caching off, pinned blocks were only lost."""
    pool = BlockPool(8, share=False)
    scheduler = Scheduler(pool, 4, 8, 64)
    request = Request(
        id="a", prompt_ids=[1, 2, 3, 4], params=SamplingParams(), root=root_key(b"w"), prefill_only=True, pin=True,
        max_total_tokens=4,
    )  # fmt: skip
    scheduler.add(request)
    scheduler.commit(scheduler.schedule())
    scheduler.finish(request, "stop")
    assert scheduler.num_pinned == 0 and pool.num_referenced == 0


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    steps = Steps(num_blocks=8, budget=6)
    steps.add("long", list(range(15)))
    plans = [steps.step() for _ in range(4)]
    assert [planned(p) for p in plans] == [[("long", 0, 6)], [("long", 6, 6)], [("long", 12, 3)], [("long", 15, 1)]]
    assert [p.work[0].sample for p in plans] == [False, False, True, True]


def test_decoders_are_not_stalled_by_a_long_prompt() -> None:
    steps = Steps(num_blocks=16, budget=6)
    steps.add("a", [1, 2])
    steps.add("b", [3, 4])
    steps.step()
    steps.add("long", list(range(20, 35)))
    assert planned(steps.step()) == [("a", 2, 1), ("b", 2, 1), ("long", 0, 4)]
    assert planned(steps.step()) == [("a", 3, 1), ("b", 3, 1), ("long", 4, 4)]


def test_requests_start_in_the_order_they_came() -> None:
    """A small one does not slip past a large one that waits for room."""
    steps = Steps(num_blocks=4, max_num_seqs=3)
    steps.add("a", [1] * 9, total=11)
    steps.add("large", [2] * 8, total=9)
    steps.add("small", [3], total=2)
    assert planned(steps.step()) == [("a", 0, 9)]
    assert planned(steps.step()) == [("a", 9, 1)]
    assert planned(steps.step()) == [("large", 0, 8), ("small", 0, 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    steps = Steps(num_blocks=8, max_num_seqs=2)
    for name in "abc":
        steps.add(name, [ord(name)], total=3)
    assert [w[0] for w in planned(steps.step())] == ["a", "b"]
    steps.step()
    assert [w[0] for w in planned(steps.step())] == ["c"]


def test_the_youngest_gives_way_goes_first_and_finds_its_own_blocks() -> None:
    steps = Steps(num_blocks=4)
    steps.add("old", [1] * 7, total=12)
    young = steps.add("young", [2] * 7, total=12)
    steps.add("later", [3] * 3, total=4)
    steps.step()
    assert planned(steps.step()) == [("old", 7, 1), ("young", 7, 1)]
    plan = steps.step()
    assert planned(plan) == [("old", 8, 1)] and plan.preempted == [young]
    assert young.status is Status.WAITING and young.blocks == [] and young.num_preemptions == 1
    assert [r.id for r in steps.scheduler.waiting] == ["young", "later"]
    while young.status is Status.WAITING:
        plan = steps.step()
    # One of its two full blocks was overwritten, the later one: a prefix outlives its continuation.
    assert planned(plan) == [("young", 4, 5), ("later", 0, 3)]
    while steps.scheduler.has_work():
        steps.step()
    assert young.tokens == [2] * 7 + [100, 101, 102, 103, 104] and young.cached_tokens == 0


def test_twins_in_one_step_compute_the_shared_blocks_once() -> None:
    steps = Steps(num_blocks=8)
    steps.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    twin = steps.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert planned(steps.step()) == [("a", 0, 9), ("b", 8, 1)]
    assert twin.cached_tokens == 8 and twin.cached_by_source == {"device": 8}
    assert steps.pool.num_referenced == 4


def test_the_last_token_is_computed_even_when_its_block_is_known() -> None:
    steps = Steps(num_blocks=8)
    a = steps.add("a", [1, 2, 3, 4, 5, 6, 7, 8], total=9)
    steps.step()
    b = steps.add("b", [1, 2, 3, 4, 5, 6, 7, 8])
    plan = steps.step()
    assert planned(plan) == [("b", 7, 1)]
    assert plan.copies == [(1, b.blocks[1])] and b.blocks[0] == 0 and a.finished
    warm = steps.add("warm", [1, 2, 3, 4, 5, 6, 7, 8], prefill_only=True)
    plan = steps.step()
    assert plan.done == [warm] and warm.finish_reason == "stop"


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    steps = Steps(num_blocks=8)
    first = steps.add("first", [1, 2, 3], total=9)
    while steps.scheduler.has_work():
        steps.step()
    steps.add("second", [*first.tokens, 5, 6])
    assert planned(steps.step()) == [("second", 8, 3)]


def test_salts_do_not_share() -> None:
    steps = Steps(num_blocks=16)
    for name, salt in [("a", None), ("b", "x"), ("c", "y"), ("d", "x")]:
        steps.add(name, [1, 2, 3, 4, 5], salt=salt)
    assert planned(steps.step()) == [("a", 0, 5), ("b", 0, 5), ("c", 0, 5), ("d", 4, 1)]


def test_prompt_logprobs_read_no_stored_kv() -> None:
    steps = Steps(num_blocks=16)
    steps.add("a", [1, 2, 3, 4, 5])
    steps.add("b", [1, 2, 3, 4, 5], prompt_logprobs=1)
    assert planned(steps.step()) == [("a", 0, 5), ("b", 0, 5)]


def test_a_step_that_breaks_takes_its_keys_along_and_no_older_ones() -> None:
    steps = Steps(num_blocks=16, budget=8)
    steps.add("good", [1, 2, 3, 4, 5], total=6)
    steps.step()
    broken = steps.add("broken", [1, 2, 3, 4, 9, 9, 9, 9, 9])
    waiting = steps.add("waiting", [7] * 9)
    plan = steps.scheduler.schedule()
    assert planned(plan) == [("broken", 4, 5), ("waiting", 0, 3)]
    assert steps.scheduler.fail(plan) == [broken, waiting]
    steps.scheduler.check()
    assert broken.finish_reason == "error" and steps.pool.num_referenced == 0
    steps.add("again", [1, 2, 3, 4, 9, 9, 9, 9, 9])
    assert planned(steps.step()) == [("again", 4, 5)]


def test_abort_returns_the_blocks_of_running_and_waiting_requests() -> None:
    steps = Steps(num_blocks=4, max_num_seqs=1)
    running, waiting = steps.add("a", [1, 2, 3, 4, 5]), steps.add("b", [1])
    steps.step()
    for request in (waiting, running, running):
        steps.scheduler.finish(request, "abort")
        steps.scheduler.check()
    assert steps.pool.num_free == 4 and not steps.scheduler.has_work()


def test_pins_stay_until_unpinned() -> None:
    steps = Steps(num_blocks=6)
    steps.add("warm", [1, 2, 3, 4, 5, 6, 7, 8, 9], prefill_only=True, pin=True)
    steps.step()
    assert steps.scheduler.num_pinned == 2 and steps.scheduler.usable_blocks == 4
    steps.add("other", [9] * 16, total=16)
    steps.step()
    steps.add("hit", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert planned(steps.step())[-1] == ("hit", 8, 1)
    steps.scheduler.unpin("warm")
    steps.scheduler.unpin("warm")
    steps.scheduler.check()
    assert steps.scheduler.num_pinned == 0


def test_pins_take_at_most_half_the_pool_and_leave_room_for_whoever_waits() -> None:
    steps = Steps(num_blocks=8)
    steps.add("warm", list(range(24)), total=24, prefill_only=True, pin=True)
    steps.step()
    assert steps.scheduler.num_pinned == 4
    steps.add("another", [9] * 4, total=4, prefill_only=True, pin=True)
    steps.step()
    assert steps.scheduler.num_pinned == 4
    steps = Steps(num_blocks=8)
    steps.add("warm", list(range(24)), total=24, prefill_only=True, pin=True)
    large = steps.add("large", [1] * 4, total=27)
    steps.step()
    assert steps.scheduler.num_pinned == 1
    while steps.scheduler.has_work():
        steps.step()
    assert large.num_output == 23


def test_forgotten_kv_is_not_found_but_serves_its_owner() -> None:
    steps = Steps(num_blocks=8)
    steps.add("a", [1, 2, 3, 4, 5])
    steps.step()
    assert steps.scheduler.forget_cached() == 1
    steps.add("b", [1, 2, 3, 4, 5])
    assert planned(steps.step()) == [("a", 5, 1), ("b", 0, 5)]


def test_counters_and_slots() -> None:
    steps = Steps(num_blocks=8)
    steps.add("a", [1, 2, 3, 4, 5], total=7)
    steps.add("b", [1, 2, 3, 4, 6], total=7)
    steps.step()
    counters = steps.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.computed_tokens) == (10, 4, 6)
    assert steps.scheduler.slots() == (12, 6)  # the shared block once
    steps.step()
    assert counters.output_tokens == 4 and counters.finished_requests == 2 and counters.steps == 2
    assert steps.scheduler.slots() == (0, 0)


def test_the_end_of_an_answer_is_copied_for_the_next_turn() -> None:
    """Its last block is partly filled, so no key names it; the next turn begins with the same tokens."""
    steps = Steps(num_blocks=8)
    steps.add("turn 1", [1, 2, 3, 4, 5], total=7)  # tokens 1..5, 100, 101; the last one's KV is never computed
    steps.step()
    steps.step()
    turn = steps.add("turn 2", [1, 2, 3, 4, 5, 100, 101, 7])
    plan = steps.step()
    assert planned(plan) == [("turn 2", 6, 2)]
    assert plan.copies == [(1, turn.blocks[1])] and turn.blocks == [0, 2]
    assert turn.cached_by_source == {"device": 6}


def test_prompts_that_part_inside_a_block_share_its_beginning() -> None:
    steps = Steps(num_blocks=8)
    steps.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], total=10)
    steps.step()
    b = steps.add("b", [1, 2, 3, 4, 5, 6, 0, 0])
    assert planned(steps.step()) == [("b", 6, 2)]
    assert b.blocks[0] == 0 and b.blocks[1] != 1, "a shared block is never written"


def test_a_tail_of_another_salt_is_not_found() -> None:
    steps = Steps(num_blocks=8)
    steps.add("a", [1, 2, 3], total=4, salt="x")
    steps.step()
    steps.add("b", [1, 2, 3, 4])
    assert planned(steps.step()) == [("b", 0, 4)]


def test_a_tail_that_is_overwritten_or_failed_is_not_found() -> None:
    steps = Steps(num_blocks=2)
    steps.add("a", [1, 2, 3], total=4)
    steps.step()
    steps.add("fills the pool", [7] * 7, total=8)
    steps.step()
    steps.add("b", [1, 2, 3, 4], total=5)
    assert planned(steps.step()) == [("b", 0, 4)]
    steps.add("broken", [5, 6], total=4)
    steps.scheduler.fail(steps.scheduler.schedule())
    steps.add("c", [5, 6, 7], total=4)
    assert planned(steps.step()) == [("c", 0, 3)]


def test_a_source_may_be_its_own_target() -> None:
    """The block next to be reused is the very one whose beginning is wanted."""
    steps = Steps(num_blocks=1)
    steps.add("a", [1, 2, 3], total=4)
    steps.step()
    steps.add("b", [1, 2, 9], total=4)
    plan = steps.step()
    assert planned(plan) == [("b", 2, 1)] and plan.copies == [(0, 0)]
