"""Brings each streamed decoder layer into its slot just before it runs, and the one after it meanwhile.

Streamed layers share slots: every parameter is, for good, a view of a slot, and forward hooks see to it that the right
layer's bytes are there. So it works whoever runs the layers: the engine, fused forms, a plain call of the model.

The order is circular: while the last layers of a sweep compute, the first ones of the next arrive. A layer that is run
out of order (a sweep was interrupted, someone calls one layer) is brought at once, and the order goes on from there.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from kvboost.errors import KVBoostError
from kvboost.weights.budget import Budget
from kvboost.weights.feeds import Feed
from kvboost.weights.hooks import After, Before, Ended, Loading, Saving
from kvboost.weights.plan import StreamPlan, StreamStats

STALE_CHECK_S = 1.0
"""After waiting so long for another thread to leave a layer, look whether it is still in there."""

_CALL = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class Seat:
    """Where one streamed layer sits: its slot, and one of its parameters with the address it must have."""

    slot: int
    sample: weakref.ref[Tensor]
    address: int

    def intact(self) -> bool:
        """Whether nobody has moved the layer's parameters away (`model.to` does)."""
        parameter = self.sample()
        return parameter is not None and parameter.data_ptr() == self.address


class Streamer:
    """Attached to one model by `attach`; lives as long as its hooks.

    Invariant: while a layer runs, its slot holds it, and no other thread loads or runs one.
    """

    def __init__(self, plan: StreamPlan, budget: Budget, seats: Sequence[Seat], feed: Feed) -> None:
        """seats: of the streamed layers, in order of execution; the feed numbers them alike."""
        self.plan, self.budget = plan, budget
        self._seats, self._feed = tuple(seats), feed
        self._next = _successors([seat.slot for seat in seats])
        self._holds: list[int | None] = [None] * plan.slots
        self._places: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._layers: list[weakref.ref[nn.Module]] = []
        self._captured = False
        self._turn = threading.Condition()
        self._owner: int | None = None
        self._line: deque[object] = deque()
        """Threads that wait for the slots."""
        self._blocks = 0
        """`sweep` and `present` blocks of the owner: those always come to their end."""
        self._running: int | None = None
        self._nested = 0
        """How often the running layer was entered."""

    def attach(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """layers: the streamed ones of `model`, as in `seats`."""
        self._layers = [weakref.ref(layer) for layer in layers]
        for place, layer in enumerate(layers):
            self._places[layer] = place
            layer.register_forward_pre_hook(Before(self, place), with_kwargs=True)
            layer.register_forward_hook(After(self, place), always_call=True)
            layer.register_state_dict_post_hook(Saving(self, place))
            layer.register_load_state_dict_pre_hook(Loading(self, place))
        model.register_forward_hook(Ended(self, -1))
        _attached[model] = self

    def layers(self) -> list[nn.Module]:
        """The streamed ones, in order."""
        return [layer for layer in (ref() for ref in self._layers) if layer is not None]

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured in a CUDA graph, inside of `sweep`."""
        return self._feed.capturable

    def stats(self) -> StreamStats:
        plan, feed = self.plan, self._feed
        return StreamStats(
            len(plan.resident),
            len(plan.streamed),
            plan.sweep_bytes,
            plan.link_bytes_per_s,
            feed.loaded_bytes,
            feed.stall_s,
        )

    @contextmanager
    def sweep(self) -> Iterator[None]:
        """Have the slots for whole passes: plain ones, and, each after `begin`, captures and replays of CUDA graphs."""
        self._acquire(None)
        try:
            yield
            if self._feed.capturable:
                self._feed.all_used()
        except BaseException:
            self._reset()
            raise
        finally:
            self._running, self._blocks = None, self._blocks - 1
            self._release()

    def begin(self) -> None:
        """Before a graph is captured or replayed: it begins with what a whole pass has left, and all of that is there."""
        if self._feed.capturable:
            self._fill_from(0)
            self._feed.settle()

    @contextmanager
    def present(self, module: nn.Module) -> Iterator[None]:
        """Have the weights of a layer in place while the block runs, which runs no other. Nothing for other modules."""
        place = self._places.get(module)
        if place is None:
            yield
            return
        self._acquire(None)
        try:
            self.enter(place)
            yield
        finally:
            self.leave(place)
            self._blocks -= 1
            self._release()

    # -- around each layer -----------------------------------------------------------------------------------------

    def enter(self, place: int) -> None:
        """Have the layer in its slot, and the slots for this thread. Raises `ModelLoadError` when it cannot be read."""
        if self._acquire(place):
            return
        try:
            if not self._seats[place].intact():
                raise KVBoostError(
                    "the weights of a streamed model were moved or replaced (model.to()?). Load it again."
                )
            self._watch_captures()
            slot = self._seats[place].slot
            if self._holds[slot] != place:
                self._fill_from(place)
            self._feed.wait(place, slot)
        except BaseException:
            self._reset()
            self._running = None
            self._release()
            raise

    def leave(self, place: int) -> None:
        """Let another layer into the slot. No effect when this one was not entered."""
        if self._owner != threading.get_ident() or self._running != place:
            return
        self._nested -= 1
        if self._nested:
            return
        self._feed.used(self._seats[place].slot)
        self._load(self._next[place])
        self._running = None
        self._release()

    def ended(self) -> None:
        """A whole pass has been started: what a capture has begun must be joined before it ends."""
        if self._captured and self._feed.capturing:
            self._feed.settle()
            self._captured = False

    def _fill_from(self, place: int) -> None:
        """The layer, and after it those that have a slot beside it."""
        taken: set[int] = set()
        for step in range(len(self._seats)):
            following = (place + step) % len(self._seats)
            slot = self._seats[following].slot
            if slot in taken:
                break
            taken.add(slot)
            self._load(following)

    def _load(self, place: int) -> None:
        slot = self._seats[place].slot
        if self._holds[slot] != place:
            self._holds[slot] = place
            self._feed.load(place, slot)

    def _watch_captures(self) -> None:
        """A capture that failed has started nothing: what it seemed to load is not there."""
        if self._feed.capturing:
            self._captured = True
        elif self._captured:
            self._reset()

    def _reset(self) -> None:
        self._holds = [None] * len(self._holds)
        self._captured = False
        self._feed.forget()

    # -- one thread at a time --------------------------------------------------------------------------------------

    def _acquire(self, place: int | None) -> bool:
        """Take the slots, for layer `place` or for a block; True when the thread is in that layer already."""
        me = threading.get_ident()
        with self._turn:
            if self._owner != me:
                self._wait_in_line()
                self._owner, self._blocks, self._running = me, 0, None
            if place is None:
                self._blocks += 1
            elif self._running == place:
                self._nested += 1
                return True
            else:
                self._running, self._nested = place, 1
            return False

    def _wait_in_line(self) -> None:
        """First come, first served: however busy the engine is, a plain call waits for one step before each layer."""
        ticket = object()
        self._line.append(ticket)
        try:
            while self._owner is not None or self._line[0] is not ticket:
                if not self._turn.wait(STALE_CHECK_S) and self._line[0] is ticket and self._abandoned():
                    return
        finally:
            self._line.remove(ticket)
            self._turn.notify_all()

    def _release(self) -> None:
        with self._turn:
            if self._running is None and self._blocks == 0:
                self._owner = None
                self._turn.notify_all()

    def _abandoned(self) -> bool:
        """Whether the owner was in a layer and is no longer: Ctrl-C skips even hooks that are always called."""
        if self._blocks or self._running is None or self._owner is None:
            return False
        layer = self._layers[self._running]()
        frame = sys._current_frames().get(self._owner)
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is layer:
                return False
            frame = frame.f_back
        return True


def streamer_of(model: nn.Module) -> Streamer | None:
    """The streamer of `model`, if its layers are streamed."""
    return _attached.get(model)


def present_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()`, those of a streamed layer while its weights are present."""
    streamer = streamer_of(model)
    if streamer is None:
        yield from model.named_parameters()
        return
    owner = {p: layer for layer in streamer.layers() for p in layer.parameters()}
    for layer, group in itertools.groupby(model.named_parameters(), key=lambda item: owner.get(item[1])):
        with nullcontext() if layer is None else streamer.present(layer):
            yield from group


_attached: weakref.WeakKeyDictionary[nn.Module, Streamer] = weakref.WeakKeyDictionary()


def _successors(slots: Sequence[int]) -> tuple[int, ...]:
    """For each layer the next one, around the circle, that has the same slot; itself when it is alone there."""
    count = len(slots)
    return tuple(
        next((i + step) % count for step in range(1, count + 1) if slots[(i + step) % count] == slots[i])
        for i in range(count)
    )
