"""Which tokens are computed in the next step, and whose KV gives way. Policy: plain Python, no torch.

There is no prefill phase and no decode phase, only token counts under one budget: running sequences that need one
token first, then the unfinished prompt, in chunks, then waiting prompts in the order they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvboost.cache.blocks import BlockPool
from kvboost.cache.prefix import KeyMemo, extend_keys
from kvboost.engine.request import Request, Status

MAX_PINNED_SHARE = 0.5
"""Pinned blocks never leave; beyond half of the pool they would starve running sequences."""


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of one request, from position `start`; the last one's logits are sampled when `sample`."""

    request: Request
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """One step: first copy whole slabs `(source, target)`, all sources read before any target is written; then compute.

    `done` are prefill-only requests that needed no compute at all.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(w.count for w in self.work)


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start, in tokens unless named otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished_requests: int = 0


class Scheduler:
    """Orders requests and owns their blocks.

    Invariants: a request is in `waiting` or in `running` or finished; only running requests own blocks; `running`
    followed by `waiting` is the order in which they came; only the last of `running` may be a prompt under way; the
    oldest makes progress in every step, so nothing starves.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_tokens_alone: int | None = None,
    ) -> None:
        """max_tokens_alone: the budget of a step when there is one request in all, whom no one else waits behind."""
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_tokens_alone = max_tokens_alone or max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pinned: dict[str, list[int]] = {}
        self.counters = CacheCounters()
        self._memo = KeyMemo(block_size)

    # -- coming and going ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the pool (`room_for`)."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, now, whatever its state; its blocks stay findable until they are needed."""
        if request.finished:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.pin and reason == "stop":
            self._pin(request)
        self._free(request, keep=reason != "error")
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.counters.finished_requests += 1

    def discard(self, request: Request) -> list[int]:
        """End a request whose KV cannot be trusted. Returns the blocks it wrote that nobody else holds, forgotten."""
        own = request.blocks[(request.cached_tokens or 0) // self.block_size :]
        self.finish(request, "error")
        unheld = [block for block in own if self.pool.is_free(block)]
        for block in unheld:
            self.pool.forget(block)
        return unheld

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def usable_blocks(self) -> int:
        """Blocks one request can have when nothing else runs and it shares nothing."""
        return self.pool.num_blocks - self.num_pinned

    def room_for(self, request: Request) -> int:
        """Tokens the request can grow to when nothing else runs: what is not pinned, and pinned blocks it shares."""
        blocks = self.pool.num_blocks
        if self.pinned:
            pinned = self._pinned_blocks()
            blocks -= len(pinned) - len(pinned.intersection(self._find(request)))
        return blocks * self.block_size

    @property
    def num_pinned(self) -> int:
        return len(self._pinned_blocks())

    def _pinned_blocks(self) -> set[int]:
        return {block for blocks in self.pinned.values() for block in blocks}

    def unpin(self, pin_id: str) -> None:
        """Let go of the blocks pinned under the id of a request; unknown ids are ignored."""
        self.pool.release(self.pinned.pop(pin_id, []))

    def forget_cached(self) -> int:
        """Forget all stored KV, pinned too; what running requests hold stays usable for them but is not found again.
        Returns the number of blocks that could have been found."""
        count = self.pool.num_cached
        for pin_id in list(self.pinned):
            self.unpin(pin_id)
        self.pool.forget_all()
        return count

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate its blocks. Follow with `commit` and `append_token`, or with `fail`.

        Requests are served in the order they run, so that only younger ones give way. Those that decode come before the
        prompt under way, if there is one: whoever is admitted after a prompt is admitted when it is complete.
        """
        plan = StepPlan()
        alone = len(self.running) + len(self.waiting) == 1
        budget = self.max_tokens_alone if alone else self.max_num_batched_tokens
        room = True
        for request in list(self.running):
            if request.status is not Status.RUNNING or request.remaining <= 0:
                continue
            count = min(request.remaining, budget)
            if count == 0:
                break
            room = self._grow(request, count, plan)
            if not room:
                break  # it was the youngest that still ran
            self._plan(plan, request, count)
            budget -= count
        if room and not plan.preempted:
            self._admit(plan, budget)
        if plan.work or plan.done:
            self.counters.steps += 1
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """`schedule` while a step is under way whose tokens nobody knows yet: those that decode go on with whatever is chosen.

        None where there is nothing to plan, or where blocks are so short that sequences might give way, although the tokens
        to come may end others. Only for a step before that chooses without the host (`Request.greedy_only`).
        """
        most = max(self.max_num_batched_tokens, self.max_tokens_alone)
        need = sum(
            self.blocks_for(r.num_scheduled + min(r.remaining, most)) - len(r.blocks)
            for r in self.running
            if r.remaining > 0
        )
        if need > self.pool.num_free:
            return None
        plan = self.schedule()
        return plan if plan.work or plan.done else None

    def commit(self, plan: StepPlan) -> None:
        """The step's KV is in the pool."""
        for work in plan.work:
            self.counters.computed_tokens += work.count
            if work.request.status is Status.RUNNING:
                work.request.num_computed = work.start + work.count

    def fail(self, plan: StepPlan) -> list[Request]:
        """The step broke: end its requests, and let no key point at KV that was never written."""
        for work in plan.work:
            first, last = work.start // self.block_size, (work.start + work.count) // self.block_size
            # By key, not by table: a request aborted since `schedule` has no table any more.
            for key in work.request.keys[first:last]:
                for block in self.pool.find([key], 1):
                    self.pool.forget(block)
        # Copies may not have been made, and a request aborted meanwhile has noted its own as a tail.
        for _, target in plan.copies:
            self.pool.forget(target)
        # `done` requests may have been found in blocks of this very step.
        failed = [r for r in (*(work.request for work in plan.work), *plan.done) if not r.finished]
        for request in failed:
            self.finish(request, "error")
        return failed

    def append_token(self, request: Request, token: int) -> None:
        """The token that the oldest of the request's steps has chosen."""
        request.tokens.append(token)
        request.num_pending -= 1
        self.counters.output_tokens += 1
        length = len(request.tokens)
        if length <= request.num_scheduled and length % self.block_size == 0:
            self._name(request, length - 1, length)  # the step that writes it was planned before its key was known

    # -- inside a step ---------------------------------------------------------------------------------------------

    def _plan(self, plan: StepPlan, request: Request, count: int) -> None:
        start, end = request.num_scheduled, request.num_scheduled + count
        complete = end == len(request.tokens) + request.num_pending
        sample = complete and not request.prefill_only
        plan.work.append(Work(request, start, count, sample))
        request.num_scheduled = end
        request.num_pending += sample
        # Full blocks are named now, before they are written: a twin later in this same step attends to them, because
        # every layer writes the keys and values of all its tokens before any of them attends.
        known = min(end, len(request.tokens))
        if known > start:
            self._name(request, start, known)

    def _name(self, request: Request, start: int, end: int) -> None:
        """Give the blocks that tokens [start, end) complete their keys."""
        extend_keys(request.keys, request.root, request.tokens, self.block_size, upto=end)
        for i in range(start // self.block_size, end // self.block_size):
            self.pool.name(request.blocks[i], request.keys[i])

    def _grow(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Make room for `count` more tokens, preempting younger requests if need be. False: not in this step."""
        need = self.blocks_for(request.num_scheduled + count) - len(request.blocks)
        while need > self.pool.num_free:
            victim = self.running[-1]
            if victim is request:
                if request is self.running[0]:
                    raise AssertionError(f"request {request.id} alone does not fit the pool")
                # Older sequences go on without it; as a prompt it keeps what it has, as a decoder it gives way.
                if request.remaining == 1:
                    self._preempt(request, plan)
                return False
            self._preempt(victim, plan)
        request.blocks.extend(self.pool.allocate() for _ in range(need))
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take a request's blocks. It goes first in the queue, and finds again whatever was not overwritten."""
        self.running.remove(request)
        self._free(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        plan.preempted.append(request)
        self.counters.preemptions += 1

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            began = time.perf_counter()
            found = self._find(request)
            if request.cached_tokens is None:
                request.lookup_s += time.perf_counter() - began
            # Admit only what has room for all its known tokens: a half-admitted prompt would be preempted again.
            need = self.blocks_for(len(request.tokens)) - len(found)
            room = self.pool.num_free - need  # of which the found blocks that are free take theirs, too
            if room < len(found) and room < sum(map(self.pool.is_free, found)):
                break
            self.waiting.popleft()
            self.pool.retain(found)
            request.blocks = found
            request.num_shared_blocks = len(found)
            request.num_computed = len(found) * self.block_size
            self._copy_tail(request, plan)
            request.num_scheduled = request.num_computed
            request.status = Status.RUNNING
            self.running.append(request)
            self._count_hit(request, request.num_computed)
            count = min(request.remaining, budget)
            if count == 0:
                plan.done.append(request)
                continue
            request.blocks.extend(
                self.pool.allocate()
                for _ in range(self.blocks_for(request.num_scheduled + count) - len(request.blocks))
            )
            self._plan(plan, request, count)
            budget -= count

    def _find(self, request: Request) -> list[int]:
        if not request.reads_prefix:
            return []
        self._memo.fill(request.keys, request.root, request.tokens, request.prompt_bytes)
        # The last token's logits are needed, so its block is computed even when it is known.
        limit = len(request.tokens) - (0 if request.prefill_only else 1)
        return self.pool.find(request.keys, limit // self.block_size)

    def _copy_tail(self, request: Request, plan: StepPlan) -> None:
        """Where whole blocks end, the next known block may still begin with what is wanted: take a copy of it.

        Only blocks of earlier steps are noted as tails (`_note_tails`), so the source is written by now.
        """
        if request.prefill_only or not request.reads_prefix:
            return
        first = len(request.blocks)
        begin = first * self.block_size
        wanted = request.tokens[begin : min(begin + self.block_size, len(request.tokens) - 1)]
        source, count = self.pool.find_tail(request.keys[first - 1] if first else request.root, wanted)
        if count:
            target = self.pool.allocate()  # may be the source itself, when that was next to be reused
            request.blocks.append(target)
            request.num_computed += count
            plan.copies.append((source, target))

    def _note_tails(self, request: Request) -> None:
        """Let what this request computed be found by its parts, too: its blocks, and the partly filled last one.

        The blocks it found whole were noted by whoever computed them.
        """
        size = self.block_size
        for i in range(request.num_shared_blocks, self.blocks_for(request.num_computed)):
            block = request.blocks[i]
            end = min((i + 1) * size, request.num_computed)
            whole = end == (i + 1) * size
            if whole and self.pool.index.key_of(block) != request.keys[i]:
                continue  # a duplicate: the block that its key finds is noted by whoever holds it
            self.pool.note_tail(request.keys[i - 1] if i else request.root, block, request.tokens[i * size : end])

    def _count_hit(self, request: Request, cached: int) -> None:
        if request.cached_tokens is not None:
            return  # after a preemption: what it finds now was its own
        request.cached_tokens = cached
        if cached:
            request.cached_by_source = {"device": cached}
        self.counters.prefix_queries += request.num_prompt
        self.counters.prefix_hits += cached
        self.counters.prompt_tokens += request.num_prompt

    def _free(self, request: Request, *, keep: bool = True) -> None:
        if keep:
            self._note_tails(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = request.num_scheduled = 0

    def _pin(self, request: Request) -> None:
        largest = max((self.blocks_for(r.max_total_tokens) for r in self._live()), default=0)
        room = min(int(self.pool.num_blocks * MAX_PINNED_SHARE), self.pool.num_blocks - largest)
        fits = max(0, room - self.num_pinned)
        # What the keys find, not the request's own table: its block may be a duplicate that no key points at.
        kept = self.pool.find(request.keys, min(fits, request.num_computed // self.block_size))
        self.pool.retain(kept)
        self.pinned[request.id] = kept

    def _live(self) -> Iterable[Request]:
        yield from self.running
        yield from self.waiting

    # -- questions -------------------------------------------------------------------------------------------------

    def holders(self) -> list[Sequence[int]]:
        """Every block table and pin: what the pool's reference counts must add up to."""
        return [*(r.blocks for r in self.running), *self.pinned.values()]

    def slots(self) -> tuple[int, int]:
        """(allocated, used) token slots of referenced blocks; a shared block counts once."""
        allocated = self.pool.num_referenced * self.block_size
        waste = sum(len(r.blocks) * self.block_size - r.num_computed for r in self.running)
        return allocated, allocated - waste

    def check(self) -> None:
        """Verify every invariant between steps. Raises `AssertionError`."""
        self.pool.check(self.holders())
        for request in self.running:
            length = len(request.tokens) + request.num_pending
            if request.status is not Status.RUNNING or not 0 <= request.num_computed <= request.num_scheduled <= length:
                raise AssertionError(f"running request {request.id} is in a wrong state")
            if len(request.blocks) != self.blocks_for(request.num_scheduled):
                raise AssertionError(f"request {request.id} holds more or fewer blocks than its tokens need")
            if len(set(request.blocks)) != len(request.blocks):
                raise AssertionError(f"request {request.id} holds a block twice")
        for request in self.waiting:
            if request.status is not Status.WAITING or request.blocks or request.num_scheduled:
                raise AssertionError(f"waiting request {request.id} holds KV")
        if len(self.running) > self.max_num_seqs:
            raise AssertionError("more sequences run than max_num_seqs")
