"""A scheduler on a pretended device that remembers, for every token slot, whose KV was written there.

KV of a position depends on the salt and on every token up to it. `Trie` gives each such prefix a number, so a
slot's content is one integer, and "this hit is exact" is one comparison. The pretended model's next token is a
function of the content it reads in the last slot: wrong KV anywhere shows as a wrong answer as well.
"""

from __future__ import annotations

from collections import Counter

from kvboost.cache.blocks import BlockPool
from kvboost.cache.prefix import root_key
from kvboost.engine.request import Request, Status
from kvboost.engine.sampling_params import SamplingParams
from kvboost.engine.scheduler import Scheduler, StepPlan, Work

GARBAGE = -1
END_TOKEN = 0
SALTS = (None, "a", "b")


class Trie:
    """Numbers for (salt, token, token, ...): equal numbers exactly when all of it is equal."""

    def __init__(self) -> None:
        self._number: dict[tuple[int, object], int] = {}

    def root(self, salt: str | None) -> int:
        return self._number.setdefault((GARBAGE, salt), len(self._number))

    def child(self, parent: int, token: int) -> int:
        return self._number.setdefault((parent, token), len(self._number))

    def path(self, salt: str | None, tokens: list[int]) -> list[int]:
        numbers, node = [], self.root(salt)
        for token in tokens:
            node = self.child(node, token)
            numbers.append(node)
        return numbers


def next_token(content: int) -> int:
    """What the pretended model says after a prefix: `END_TOKEN` once in a while, else one of two tokens."""
    mixed = content * 2654435761 % 2**32
    return END_TOKEN if mixed % 11 == 0 else 1 + (mixed >> 16) % 2


class Rig:
    """Runs operations on a `Scheduler` and checks after each one what must always hold.

    `requests` are the live ones in the order they came. Everything raises `AssertionError`.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, *, share: bool = True) -> None:
        self.pool = BlockPool(num_blocks, share=share)
        self.scheduler = Scheduler(self.pool, block_size, max_num_seqs, budget)
        self.block_size, self.budget, self.share = block_size, budget, share
        self.device = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.trie = Trie()
        self.requests: list[Request] = []
        self.history: list[list[int]] = []
        self.content: dict[bytes, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self._salts: dict[str, str | None] = {}

    # -- operations ------------------------------------------------------------------------------------------------

    def add(
        self, suffix: list[int], *, like: int = 0, keep: int = 0, salt: str | None = None, extra: int = 4,
        prefill_only: bool = False, pin: bool = False, prompt_logprobs: bool = False,
    ) -> Request | None:  # fmt: skip
        """Queue a prompt: `keep` tokens of an earlier sequence, then `suffix`. None when it could never fit."""
        start = self.history[like % len(self.history)][:keep] if self.history else []
        prompt = start + suffix
        total = len(prompt) + (0 if prefill_only else extra)
        if self.scheduler.blocks_for(total) > self.scheduler.usable_blocks:
            self.seen["refused"] += 1
            return None
        request = Request(
            id=str(len(self._salts)), prompt_ids=prompt, root=root_key(b"weights", salt), max_total_tokens=total,
            params=SamplingParams(temperature=0, prompt_logprobs=0 if prompt_logprobs else None), prefill_only=prefill_only, pin=pin,
        )  # fmt: skip
        self._salts[request.id] = salt
        self.scheduler.add(request)
        self.requests.append(request)
        self.history = [*self.history[-7:], request.tokens]  # the live list: later prompts may continue an answer
        self.check()
        return request

    def step(self, *, abort: int | None = None, ahead: int = 0) -> StepPlan:
        """One whole step: plan, write, attend, sample, finish. `abort`: end that request between plan and commit.

        `ahead`: this many further steps are begun before the tokens of the one before are known, where that may be.
        """
        plan = self.plan()
        if abort is not None:
            self._abort(abort)
        for work in plan.work:
            self._write(work, garbage=False)
            self._attend(work)
        for _ in range(ahead):
            following = self.scheduler.plan_ahead(plan)
            if following is None:
                break
            self._begin_ahead(plan, following)
            plan = following
        self._collect(plan)
        self.check()
        return plan

    def _begin_ahead(self, plan: StepPlan, following: StepPlan) -> None:
        """The device computes `following` with the block tables of now, whoever ends when `plan` is read."""
        taken = [(work, list(work.request.blocks)) for work in following.work]
        for work, blocks in taken:
            assert len(blocks) == self.scheduler.blocks_for(work.start + 1)
        self._collect(plan)
        for work, blocks in taken:
            self._write(work, garbage=work.request.finished, blocks=blocks)
        self.scheduler.adopt(following)
        assert not any(w.request.finished for w in following.work)
        for work in following.work:
            self._note_content(work)
            self._attend(work)
            self.seen["begun ahead"] += 1

    def _collect(self, plan: StepPlan) -> None:
        answers = [self._read(w) for w in plan.work]
        self.scheduler.commit(plan)
        for work, content in zip(plan.work, answers, strict=True):
            request = work.request
            if request.finished:
                continue
            if work.sample:
                token = next_token(content)
                self.scheduler.append_token(request, token)
                if token == END_TOKEN:
                    self._finish(request, "stop")
                elif len(request.tokens) >= request.max_total_tokens:
                    self._finish(request, "length")
            elif request.prefill_only and request.remaining == 0:
                self._finish(request, "stop")
        for request in plan.done:
            if not request.finished:
                self._finish(request, "stop")

    def failing_step(self, written: int, *, abort: int | None = None) -> StepPlan:
        """A step that breaks: the first `written` pieces of work left garbage, the rest left nothing."""
        plan = self.plan()
        blocks = {id(w): list(w.request.blocks) for w in plan.work}
        if abort is not None:
            self._abort(abort)
        for work in plan.work[:written]:
            self._write(work, garbage=True, blocks=blocks[id(work)])
        self.scheduler.fail(plan)
        assert all(w.request.finished for w in plan.work) and all(r.finished for r in plan.done)
        self._drop_finished()
        self.seen["failed steps"] += 1
        self.check()
        return plan

    def abort(self, which: int) -> None:
        self._abort(which)
        self.check()

    def unpin(self, which: int) -> None:
        pins = list(self.scheduler.pinned)
        if pins:
            self.scheduler.unpin(pins[which % len(pins)])
            self.seen["unpinned"] += 1
        self.check()

    def forget_cached(self) -> None:
        self.scheduler.forget_cached()
        assert self.pool.num_cached == 0 and not self.scheduler.pinned
        self.check()

    def drain(self) -> None:
        """Run until nothing is left: everything ends, in bounded time, and gives back what it held."""
        bound = 2 + sum(2 * r.max_total_tokens + 2 for r in self.requests) * (1 + len(self.requests))
        while self.scheduler.has_work():
            self.step()
            bound -= 1
            assert bound > 0, "requests do not end"
        assert not self.requests
        for pin in list(self.scheduler.pinned):
            self.scheduler.unpin(pin)
        assert self.pool.num_referenced == 0
        self.check()

    # -- one step --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """`schedule()`, and all that must hold of a plan before anything is written."""
        scheduler = self.scheduler
        had_work, oldest = scheduler.has_work(), scheduler.running[0] if scheduler.running else None
        was_running = set(map(id, scheduler.running))
        plan = scheduler.schedule()
        self.seen["preempted"] += len(plan.preempted)
        self.seen["done without compute"] += len(plan.done)
        if had_work:
            assert plan.work or plan.done, "there is work but nothing progresses"
        if oldest is not None:
            assert any(w.request is oldest for w in plan.work), "the oldest running request does not progress"
        assert plan.num_tokens <= self.budget, "over the token budget"
        assert len({id(w.request) for w in plan.work}) == len(plan.work), "two pieces of work for one request"
        for work in plan.work:
            request, end = work.request, work.start + work.count
            assert work.count > 0 and work.start == request.num_computed and end <= len(request.tokens)
            assert work.sample == (end == len(request.tokens) and not request.prefill_only)
            assert len(request.blocks) == scheduler.blocks_for(end), "holds more or fewer blocks than it writes"
            self._note_content(work)
        admitted = [w for w in plan.work if id(w.request) not in was_running]
        for request in plan.done:
            assert id(request) not in was_running and request.prefill_only and request.remaining == 0
        for work in admitted:
            self._check_admitted(work)
        held = {source: list(self.device[source]) for source, _ in plan.copies}
        for source, target in plan.copies:
            self.device[target] = list(held[source])
            self.seen["copied blocks"] += 1
        self._check_writes(plan, {id(w.request) for w in admitted} | set(map(id, plan.done)))
        return plan

    def _note_content(self, work: Work) -> None:
        """What the blocks that this work completes must hold."""
        request = work.request
        for i in range(work.start // self.block_size, (work.start + work.count) // self.block_size):
            numbers = self._path(request, request.tokens[: (i + 1) * self.block_size])
            self.content[request.keys[i]] = numbers[i * self.block_size :]

    def _check_admitted(self, work: Work) -> None:
        """It found all that could be found: the next block is known to nobody else (so twins compute once)."""
        request, first = work.request, work.start // self.block_size
        self.seen["cached blocks"] += first
        if not self.share or not request.reads_prefix:
            assert work.start == 0
            return
        limit = (len(request.tokens) - (not request.prefill_only)) // self.block_size
        if first < limit:
            known = self.pool.index.find([request.keys[first]])
            assert known in ([], [request.blocks[first]]), "computes a block that could have been found"

    def _check_writes(self, plan: StepPlan, admitted: set[int]) -> None:
        """A block written in this step is its writer's own, or completed in this step and read by newcomers."""
        written: set[int] = set()
        pinned = {b for blocks in self.scheduler.pinned.values() for b in blocks}
        for order, work in enumerate(plan.work):
            first, last = work.start // self.block_size, (work.start + work.count - 1) // self.block_size
            for i in range(first, last + 1):
                block = work.request.blocks[i]
                assert block not in written and block not in pinned, "a block has two writers"
                written.add(block)
                completed = (i + 1) * self.block_size <= work.start + work.count
                key = self.pool.index.key_of(block)
                assert key is None or (completed and key == work.request.keys[i]), "writes into a findable block"
                others = [r for r in self.scheduler.running if r is not work.request and block in r.blocks]
                later = {id(w.request) for w in plan.work[order + 1 :]} | set(map(id, plan.done))
                for other in others:
                    assert completed and id(other) in admitted & later, "writes into a block that others hold"
                    self.seen["shared in the same step"] += 1

    def _write(self, work: Work, *, garbage: bool, blocks: list[int] | None = None) -> None:
        blocks = work.request.blocks if blocks is None else blocks
        if not blocks:
            blocks = self._aborted_blocks(work)
        numbers = self._path(work.request, work.request.tokens[: work.start + work.count])
        for position in range(work.start, work.start + work.count):
            slot = self.device[blocks[position // self.block_size]]
            slot[position % self.block_size] = GARBAGE if garbage else numbers[position]

    def _aborted_blocks(self, work: Work) -> list[int]:
        """The runner took its block tables before the abort."""
        return self._tables[work.request.id]

    def _attend(self, work: Work) -> None:
        """Every position before the piece's end holds this request's KV, and nothing else does as well."""
        blocks, end = work.request.blocks or self._aborted_blocks(work), work.start + work.count
        read = [self.device[blocks[p // self.block_size]][p % self.block_size] for p in range(end)]
        assert read == self._path(work.request, work.request.tokens[:end]), "attends to somebody else's KV"

    def _read(self, work: Work) -> int:
        blocks, last = work.request.blocks or self._aborted_blocks(work), work.start + work.count - 1
        return self.device[blocks[last // self.block_size]][last % self.block_size]

    def _path(self, request: Request, tokens: list[int]) -> list[int]:
        return self.trie.path(self._salts[request.id], tokens)

    def _abort(self, which: int) -> None:
        self._tables = {r.id: list(r.blocks) for r in self.requests}
        if self.requests:
            self.scheduler.finish(self.requests[which % len(self.requests)], "abort")
            self.seen["aborted"] += 1
            self._drop_finished()

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self.seen["finished"] += 1
        if request.num_preemptions:
            self.seen["finished after a preemption"] += 1
        if not request.prefill_only:
            expected = self._answer(request)
            assert request.tokens == expected, f"request {request.id} answered {request.tokens}, not {expected}"
        if request.id in self.scheduler.pinned:
            pinned = self.scheduler.pinned[request.id]
            self.seen["pinned blocks"] += len(pinned)
            assert pinned == self.pool.find(request.keys, len(pinned)), "pinned blocks cannot be found"
        self._drop_finished()

    def _answer(self, request: Request) -> list[int]:
        tokens = list(request.prompt_ids)
        while len(tokens) < request.max_total_tokens:
            tokens.append(next_token(self._path(request, tokens)[-1]))
            if tokens[-1] == END_TOKEN:
                break
        return tokens

    def _drop_finished(self) -> None:
        for request in self.requests:
            if request.finished:
                assert not request.blocks, "a finished request holds blocks"
        self.requests = [r for r in self.requests if not r.finished]

    # -- between steps ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.seen["operations"] += 1
        scheduler = self.scheduler
        scheduler.check()
        live = [*scheduler.running, *scheduler.waiting]
        assert [r.id for r in live] == [r.id for r in self.requests], "requests overtook each other"
        assert all(r.remaining == 1 for r in scheduler.running[:-1]), "a prompt under way is not the last to run"
        for request in scheduler.running:
            waste = len(request.blocks) * self.block_size - request.num_computed
            assert request.status is Status.RUNNING and 0 <= waste < self.block_size, "wastes a block or more"
        for request in live:
            assert scheduler.blocks_for(request.max_total_tokens) <= scheduler.usable_blocks, "pins starve a request"
        allocated, used = scheduler.slots()
        assert allocated - used < self.block_size * max(1, len(scheduler.running))
        assert scheduler.num_pinned <= self.pool.num_blocks // 2
        if not self.share:
            assert self.pool.num_cached == 0
        for block in range(self.pool.num_blocks):
            key = self.pool.index.key_of(block)
            assert key is None or self.device[block] == self.content[key], f"block {block} is not what its key says"
