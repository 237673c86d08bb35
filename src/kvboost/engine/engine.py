"""The one loop: everything that generates submits requests here.

A thread owns the scheduler, the pool and the model. Callers hand it requests and commands through an inbox and get
outputs through each request's `sink`, which runs in the engine thread and must be quick.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvboost.engine import sampler
from kvboost.engine.outputs import RequestOutput, TokenLogprobs
from kvboost.engine.request import Request
from kvboost.engine.runner import Runner, StepLogits
from kvboost.engine.scheduler import Scheduler, StepPlan
from kvboost.engine.stats import EngineStats, read_stats
from kvboost.engine.stopping import ends_after
from kvboost.errors import EngineBusy, EngineClosed, EngineStepError, KVBoostError, PromptTooLong
from kvboost.kernels.native.threads import release_team
from kvboost.weights.plan import StreamStats

log = logging.getLogger("kvboost")
T = TypeVar("T")


@dataclass(slots=True)
class _Inbox:
    """What other threads left for the engine thread; guarded by the engine's condition."""

    requests: deque[Request]
    commands: deque[Callable[[], None]]


@dataclass(slots=True)
class _Flight:
    """A step that was started and whose tokens are still to be read, or that could not even be planned (plan None) or started.

    logits None: nothing to compute, or an error.
    """

    plan: StepPlan | None
    logits: StepLogits | None = None
    error: Exception | None = None

    @property
    def tokens_on_device(self) -> bool:
        """Whether the next step can take what this one chooses from the device."""
        return self.logits is not None and (self.logits.early is not None or not self.logits.requests)

    @property
    def wanted(self) -> bool:
        """Whether anyone still waits for it."""
        return self.plan is None or bool(self.plan.done) or any(not work.request.finished for work in self.plan.work)


class Engine:
    """Runs requests until they finish. Thread-safe; every public method may be called from any thread.

    Invariant: after any step, failed or not, `check()` holds and every live request is waiting or running.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, max_num_waiting: int) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._max_num_waiting = max_num_waiting
        self._changed = threading.Condition()
        self._inbox = _Inbox(deque(), deque())
        self._num_waiting = 0
        self._flight: _Flight | None = None
        self._listeners: tuple[Callable[[Scheduler], None], ...] = ()
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="kvboost-engine", daemon=True)
        self._thread.start()
        # While the interpreter goes down, a daemon thread stops where it stands, holding what locks it holds.
        atexit.register(self.close)

    # -- for callers -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], *, block: bool = False) -> None:
        """Queue requests, all at once when they fit the waiting queue.

        With `block`, more requests than `max_num_waiting` are queued in pieces as room appears; without it, they are
        refused together with `EngineBusy`. Raises `EngineClosed`.
        """
        self._require_this_process()
        release_team()
        pending = deque(requests)
        with self._changed:
            while pending:
                self._require_open()
                room = self._max_num_waiting - self._num_waiting - len(self._inbox.requests)
                if room < len(pending) and not block:
                    raise EngineBusy(
                        f"{self._num_waiting} requests wait already and max_num_waiting is {self._max_num_waiting}. "
                        "Try again later, or raise max_num_waiting."
                    )
                now = time.perf_counter()
                for _ in range(min(max(room, 0), len(pending))):
                    request = pending.popleft()
                    request.arrival_s = request.arrival_s or now
                    self._inbox.requests.append(request)
                self._changed.notify_all()
                if pending:
                    self._changed.wait()

    def abort(self, request: Request) -> None:
        """End a request as soon as the running step is over; its blocks are returned. No effect once finished."""
        with contextlib.suppress(EngineClosed):
            self._post(lambda: self._finish(request, "abort"))

    def call(self, function: Callable[[Scheduler], T]) -> T:
        """Run `function(scheduler)` in the engine thread, between two steps, and return its result."""
        if threading.current_thread() is self._thread:
            return function(self._scheduler)
        return self.call_soon(function).result()

    def call_soon(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """`call` without waiting: for an event loop, which must not be held up by a step. Raises `EngineClosed`."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function(self._scheduler))
            except BaseException as error:
                future.set_exception(error)

        self._post(command)
        return future

    def listen(self, listener: Callable[[Scheduler], None]) -> Callable[[], None]:
        """Have `listener(scheduler)` called in the engine thread after each turn, when all sinks of it have been.

        One call for all requests of a step: whoever passes outputs to another thread can wake it once. It must be
        quick, and must change nothing. Returns a function that ends it.
        """
        self._set_listeners(lambda present: (*present, listener))
        return lambda: self._set_listeners(lambda present: tuple(f for f in present if f is not listener))

    def _set_listeners(self, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        self._require_this_process()
        with self._changed:
            self._listeners = change(self._listeners)

    def stats(self) -> EngineStats:
        """A consistent snapshot, taken between two steps."""
        return self.call(lambda scheduler: read_stats(scheduler, self._runner.weights))

    @property
    def weights(self) -> StreamStats | None:
        """What streaming has done; None when all weights are resident."""
        return self._runner.weights

    def check(self) -> None:
        """Verify every invariant between two steps. Raises `AssertionError`."""
        self.call(Scheduler.check)

    def close(self) -> None:
        """Abort what is in flight and stop the thread. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child: the thread lives in the parent
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._closing

    def _post(self, command: Callable[[], None]) -> None:
        self._require_this_process()
        with self._changed:
            self._require_open()
            self._inbox.commands.append(command)
            self._changed.notify_all()

    def _require_this_process(self) -> None:
        """Before any lock is taken: one that the parent's thread held at the fork is never given back here."""
        if os.getpid() != self._pid:
            raise EngineClosed("this engine was made in another process: its thread did not survive the fork. "
                               "Load the model after forking, or use the 'spawn' start method.")  # fmt: skip

    def _require_open(self) -> None:
        if self._closing:
            raise EngineClosed("the engine is closed. Make a new one with KVBoost.from_pretrained(...).")

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException:
            log.exception("the engine thread ended; every request is aborted")
            raise
        finally:
            self._closing = True  # whatever ended the loop: nobody may wait for it any more
            self._abort_everything()

    def _turn(self) -> bool:
        """Take what arrived, run commands, run one step. False when the engine is closing."""
        if self._idle() and self._runner.take_memory_ahead(self._scheduler.pool.num_touched):
            return True
        with self._changed:
            while self._idle():
                release_team()  # whoever computes next, another thread perhaps, has the cores to itself
                self._changed.wait()
            if self._closing:
                return False
            commands, self._inbox.commands = self._inbox.commands, deque()
            arrived, self._inbox.requests = self._inbox.requests, deque()
            for request in arrived:
                self._scheduler.add(request)
            self._num_waiting = len(self._scheduler.waiting)
        for request in arrived:
            self._require_room(request)
        if commands:
            self._land()
        for command in commands:
            command()
        if self._scheduler.has_work():
            self._step()
        self._note_waiting()
        self._notify()
        return True

    def _idle(self) -> bool:
        return not (self._inbox.requests or self._inbox.commands or self._closing or self._scheduler.has_work())

    def _notify(self) -> None:
        for listener in self._listeners:
            try:
                listener(self._scheduler)
            except Exception:  # a caller's mistake must not end the loop
                log.exception("a listener of the engine failed")

    def _require_room(self, request: Request) -> None:
        """Pinned blocks may have left less than the pool's size: shorten the answer, or refuse the prompt."""
        room = self._scheduler.room_for(request)
        request.max_total_tokens = min(request.max_total_tokens, room)
        if request.num_prompt + (not request.prefill_only) > room:
            self._end_with_error([request], PromptTooLong("prompt", f"has {request.num_prompt} tokens; {room} are left "
                                 "beside the pinned blocks. Unpin some, or raise the KV memory."))  # fmt: skip

    def _note_waiting(self) -> None:
        """Tell blocked submitters when the queue got shorter."""
        waiting = len(self._scheduler.waiting)
        if waiting != self._num_waiting:
            with self._changed:
                self._num_waiting = waiting
                self._changed.notify_all()

    def _step(self) -> None:
        """Run one step, or finish the one under way; where the device allows, the next is started before its tokens
        are read, so that the host's work is done while the device computes."""
        flight = self._flight or self._launch(self._scheduler.schedule)
        if flight is None:
            return
        ahead = self._flight = self._launch_ahead(flight)
        error = self._collect(flight)
        if ahead is None:
            return
        ahead.error = ahead.error or error  # it may have read what the broken step should have written
        if ahead.error is not None:
            self._land()
        elif not ahead.wanted:
            self._flight = None

    def _land(self) -> None:
        """Finish the step under way, if there is one: between steps nothing is."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._collect(flight)

    def _launch(self, planned: Callable[[], StepPlan | None], follows: StepLogits | None = None) -> _Flight | None:
        """Plan a step and start it. What goes wrong is told when it is collected: the step before comes first."""
        plan: StepPlan | None = None
        try:
            plan = planned()
            if plan is None:
                return None
            now = time.perf_counter()
            for work in plan.work:
                if work.request.first_scheduled_s is None:
                    work.request.first_scheduled_s = now
            return _Flight(plan, self._runner.run(plan, follows) if plan.work else None)
        except Exception as error:
            log.exception("a step failed; its requests end with an error")
            return _Flight(plan, error=error)

    def _launch_ahead(self, flight: _Flight) -> _Flight | None:
        if not self._runner.looks_ahead or not flight.tokens_on_device:
            return None
        return self._launch(self._scheduler.plan_ahead, flight.logits)

    def _collect(self, flight: _Flight) -> Exception | None:
        """Read and deliver what a step has chosen. Returns what went wrong, if anything did; its requests know it then."""
        plan, logits = flight.plan, flight.logits
        if plan is None or flight.error is not None:
            assert flight.error is not None
            self._fail(plan, flight.error)
            return flight.error
        try:
            if logits is not None:
                self._read_prompt_logprobs(logits)
                self._scheduler.commit(plan)
                self._sample(logits)
            for work in plan.work:
                if work.request.prefill_only and work.request.num_computed == len(work.request.tokens):
                    self._finish(work.request, "stop")
            for request in plan.done:
                self._finish(request, "stop")
        except Exception as error:
            log.exception("a step failed; its requests end with an error")
            self._fail(plan, error)
            return error
        return None

    def _sample(self, logits: StepLogits) -> None:
        """Pick and deliver a token for each request that has not ended meanwhile."""
        requests = logits.requests
        if logits.early is not None:
            tokens, values = logits.early.read()

            def pick(rows: Sequence[int]) -> sampler.Sampled:
                return sampler.check_greedy([tokens[i] for i in rows], [values[i] for i in rows])
        else:

            def pick(rows: Sequence[int]) -> sampler.Sampled:
                scores = logits.sampled if len(rows) == len(requests) else logits.sampled[list(rows)]
                return sampler.sample(scores, [_row(requests[i]) for i in rows])

        self._pick(requests, [i for i, request in enumerate(requests) if not request.finished], pick)

    def _pick(
        self, requests: Sequence[Request], rows: list[int], pick: Callable[[Sequence[int]], sampler.Sampled]
    ) -> None:
        """Those for which no token can be picked end with the error, alone."""
        if not rows:
            return
        try:
            sampled = pick(rows)
        except sampler.SampleError as error:
            if not error.rows:
                raise
            bad = [rows[i] for i in sorted(set(error.rows))]
            for i in bad:
                # NaN in a slot would outlive the request: padded attention multiplies it by a weight of zero.
                self._runner.clear(self._scheduler.discard(requests[i]))
            self._end_with_error([requests[i] for i in bad], error)
            self._pick(requests, [i for i in rows if i not in set(bad)], pick)
        else:
            self._deliver([requests[i] for i in rows], sampled)

    def _deliver(self, requests: Sequence[Request], sampled: sampler.Sampled) -> None:
        now = time.perf_counter()
        ended: list[tuple[Request, tuple[str, int | str | None]]] = []
        for request, token, logprobs in zip(requests, sampled.token_ids, sampled.logprobs, strict=True):
            self._scheduler.append_token(request, token)
            request.first_token_s = request.first_token_s or now
            text, matched = request.detokenizer.push([token]) if request.detokenizer is not None else ("", None)
            end = ends_after(request, token, matched)
            if end is None:
                _emit(request, RequestOutput([token], text, _listed(logprobs), now))
                continue
            if request.detokenizer is not None and matched is None:
                text += request.detokenizer.flush()
            ended.append((request, end))
            _emit(request, RequestOutput([token], text, _listed(logprobs), now, *end))
        for request, end in ended:  # giving back a long prompt's blocks takes a millisecond: its reader need not wait
            self._scheduler.finish(request, *end)

    def _read_prompt_logprobs(self, logits: StepLogits) -> None:
        for request, first, rows in logits.prompt_rows:
            following = request.prompt_ids[first + 1 : first + 1 + rows.shape[0]]
            found = sampler.token_logprobs(rows, following, request.params.prompt_logprobs or 0)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs[first + 1 : first + 1 + len(found)] = found

    def _finish(self, request: Request, reason: str) -> None:
        if request.finished:
            return
        text = request.detokenizer.flush() if request.detokenizer is not None else ""
        self._scheduler.finish(request, reason)
        _emit(request, RequestOutput([], text, None, time.perf_counter(), reason))

    def _fail(self, plan: StepPlan | None, error: Exception) -> None:
        """End the step's requests with an error. When planning itself broke, every request goes, and all stored KV."""
        if plan is not None:
            failed = self._scheduler.fail(plan)
        else:
            failed = [*self._scheduler.running, *self._scheduler.waiting]
            self._scheduler.forget_cached()
        told = EngineStepError(f"the step that computed this request failed: {type(error).__name__}: {error}")
        told.__cause__ = error
        self._end_with_error(failed, told)

    def _end_with_error(self, requests: Sequence[Request], error: KVBoostError) -> None:
        for request in requests:
            self._scheduler.finish(request, "error")
            _emit(request, RequestOutput([], "", None, time.perf_counter(), "error", None, error))

    def _abort_everything(self) -> None:
        with self._changed:
            for request in self._inbox.requests:
                self._scheduler.add(request)
            self._inbox.requests.clear()
            commands = list(self._inbox.commands)
            self._inbox.commands.clear()
            self._changed.notify_all()
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(request, "abort")
        for command in commands:
            command()
        self._notify()


def _row(request: Request) -> sampler.SampleRow:
    return sampler.SampleRow(
        params=request.params,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        seed=request.seed,
        stop_ids=request.stop_ids,
        bad_word_ids=request.bad_word_ids,
        processors=request.processors,
        grammar=request.grammar,
    )


def _listed(logprobs: TokenLogprobs | None) -> list[TokenLogprobs] | None:
    return None if logprobs is None else [logprobs]


def _emit(request: Request, output: RequestOutput) -> None:
    if request.sink is None:
        return
    try:
        request.sink(output)
    except Exception:  # a caller's mistake must not end other requests
        log.exception("the receiver of request %s failed", request.id)
