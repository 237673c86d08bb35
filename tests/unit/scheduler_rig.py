"""A scheduler on a pretended device that remembers, for every token slot, whose KV was written there.

KV of a position depends on the salt and on every token up to it. `Trie` gives each such prefix a number, so a
slot's content is one integer, and "this hit is exact" is one comparison. The pretended model's next token is a
function of the content it reads in the last slot: wrong KV anywhere shows as a wrong answer as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Begun:
    """A step as the device was given it: of each piece of work the blocks, and the tokens up to its end."""

    plan: StepPlan
    tables: list[list[int]]
    tokens: list[list[int]]


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
        self._were_running: set[str] = set()

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

    def step(self, *, abort: int | None = None, ahead: int = 0, breaks: bool = False) -> StepPlan:
        """One whole step: plan, write, attend, sample, finish. `abort`: end that request between plan and commit.

        `ahead`: this many further steps are begun before the tokens of the one before are known, where that may be.
        `breaks`: the last of those leaves garbage, and fails.
        """
        begun = self._begin(self.plan())
        if abort is not None:
            self._abort(abort)
        self._compute(begun)
        for i in range(ahead):
            following = self.scheduler.plan_ahead()
            if following is None:
                break
            assert not following.preempted
            following_begun = self._begin(following, begun)
            self._collect(begun)
            self.seen["begun ahead"] += len(following.work)
            self.seen["prompts begun ahead"] += any(w.count > 1 for w in following.work)
            begun = following_begun
            if breaks and i == ahead - 1:
                self.seen["failed ahead"] += 1
                self._break(begun, len(following.work))
                return following
            self._compute(begun)
        self._collect(begun)
        self.check()
        return begun.plan

    def failing_step(self, written: int, *, abort: int | None = None) -> StepPlan:
        """A step that breaks: the first `written` pieces of work left garbage, the rest left nothing."""
        begun = self._begin(self.plan())
        if abort is not None:
            self._abort(abort)
        self._break(begun, written)
        return begun.plan

    def _begin(self, plan: StepPlan, before: Begun | None = None) -> Begun:
        """What the device is given: tables and tokens of now, and of `before` the tokens that only the device knows."""
        self._check_plan(plan)
        chosen = {} if before is None else {id(w.request): self._read(before, w) for w in before.plan.work if w.sample}
        tables, tokens = [], []
        for work in plan.work:
            known = work.request.tokens
            if work.start == len(known):
                known = [*known, next_token(chosen[id(work.request)])]
            tables.append(list(work.request.blocks))
            tokens.append(known[: work.start + work.count])
            self._note_content(work.request, work.start, min(work.start + work.count, len(work.request.tokens)))
        return Begun(plan, tables, tokens)

    def _compute(self, begun: Begun) -> None:
        held = {source: list(self.device[source]) for source, _ in begun.plan.copies}
        for source, target in begun.plan.copies:
            self.device[target] = list(held[source])
            self.seen["copied blocks"] += 1
        for work, blocks, tokens in zip(begun.plan.work, begun.tables, begun.tokens, strict=True):
            self._write(work, blocks, self._path(work.request, tokens))
            read = [self.device[blocks[p // self.block_size]][p % self.block_size] for p in range(len(tokens))]
            assert read == self._path(work.request, tokens), "attends to somebody else's KV"

    def _break(self, begun: Begun, written: int) -> None:
        for work, blocks, tokens in list(zip(begun.plan.work, begun.tables, begun.tokens, strict=True))[:written]:
            self._write(work, blocks, [GARBAGE] * len(tokens))
        self.scheduler.fail(begun.plan)
        assert all(w.request.finished for w in begun.plan.work) and all(r.finished for r in begun.plan.done)
        self._drop_finished()
        self.seen["failed steps"] += 1
        self.check()

    def _collect(self, begun: Begun) -> None:
        answers = [self._read(begun, w) for w in begun.plan.work]
        self.scheduler.commit(begun.plan)
        for work, content in zip(begun.plan.work, answers, strict=True):
            request = work.request
            if request.finished:
                continue
            if work.sample:
                token = next_token(content)
                self.scheduler.append_token(request, token)
                length = len(request.tokens)
                self._note_content(request, length - 1, min(length, request.num_scheduled))
                if token == END_TOKEN:
                    self._finish(request, "stop")
                elif length >= request.max_total_tokens:
                    self._finish(request, "length")
            elif request.prefill_only and request.num_computed == len(request.tokens):
                self._finish(request, "stop")
        for request in begun.plan.done:
            if not request.finished:
                self._finish(request, "stop")

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
        """`schedule()` between two steps: whoever came first goes on."""
        scheduler = self.scheduler
        had_work, oldest = scheduler.has_work(), scheduler.running[0] if scheduler.running else None
        plan = scheduler.schedule()
        self.seen["preempted"] += len(plan.preempted)
        if had_work:
            assert plan.work or plan.done, "there is work but nothing progresses"
        if oldest is not None:
            assert any(w.request is oldest for w in plan.work), "the oldest running request does not progress"
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        """All that must hold of a plan before anything is written."""
        scheduler = self.scheduler
        self.seen["done without compute"] += len(plan.done)
        assert plan.num_tokens <= self.budget, "over the token budget"
        assert len({id(w.request) for w in plan.work}) == len(plan.work), "two pieces of work for one request"
        for work in plan.work:
            request, end = work.request, work.start + work.count
            known = len(request.tokens) + request.num_pending - work.sample
            assert work.count > 0 and end == request.num_scheduled and end <= known
            assert work.sample == (end == known and not request.prefill_only)
            assert len(request.blocks) == scheduler.blocks_for(end), "holds more or fewer blocks than it writes"
        admitted = [w for w in plan.work if w.request.id not in self._were_running]
        for request in plan.done:
            assert request.id not in self._were_running and request.prefill_only and request.remaining == 0
        for work in admitted:
            self._check_admitted(work)
        self._check_writes(plan, {id(w.request) for w in admitted} | set(map(id, plan.done)))
        self._were_running = {r.id for r in scheduler.running}

    def _note_content(self, request: Request, start: int, end: int) -> None:
        """What the blocks that tokens [start, end) complete must hold."""
        for i in range(start // self.block_size, end // self.block_size):
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

    def _write(self, work: Work, blocks: list[int], numbers: list[int]) -> None:
        for position in range(work.start, work.start + work.count):
            self.device[blocks[position // self.block_size]][position % self.block_size] = numbers[position]

    def _read(self, begun: Begun, work: Work) -> int:
        blocks, last = begun.tables[begun.plan.work.index(work)], work.start + work.count - 1
        return self.device[blocks[last // self.block_size]][last % self.block_size]

    def _path(self, request: Request, tokens: list[int]) -> list[int]:
        return self.trie.path(self._salts[request.id], tokens)

    def _abort(self, which: int) -> None:
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
