"""The order of copies and compute on a GPU, on a device that is made of lists: streams, events, captures and replays.

What the host gives to the streams is executed afterwards in random interleavings that respect events and nothing else.
A layer that computes while its slot holds anything but its weights fails, and so does what CUDA refuses: an event that
crosses the border of a capture, and a capture that ends with work that nobody waits for.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.weights import gpu_feeds
from kvboost.weights.budget import Budget
from kvboost.weights.gpu_feeds import CopyFeed
from kvboost.weights.plan import Demand, StreamPlan
from kvboost.weights.streamer import Seat, Streamer

Op = tuple[Any, ...]


class Event:
    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture


class Capture:
    """Operations by stream, in the order they were given."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.ops: dict[Stream, list[Op]] = {origin: []}

    def require_joined(self) -> None:
        waited = {op[1] for op in self.ops[self.origin] if op[0] == "wait"}
        for stream, ops in self.ops.items():
            rest = ops if stream is not self.origin else []
            last = max((i for i, op in enumerate(rest) if op[0] == "copy"), default=-1)
            joined = any(op[0] == "record" and op[1] in waited for op in rest[last + 1 :])
            assert last < 0 or joined, "the capture ends with a copy that nobody waits for"


class Device:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.capture: Capture | None = None
        self.current = Stream(self)

    def give(self, stream: Stream, op: Op) -> None:
        if self.capture is not None and stream in self.capture.ops:
            self.capture.ops[stream].append(op)
        else:
            stream.ops.append(op)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.ops: list[Op] = []
        device.streams.append(self)

    def record_event(self) -> Event:
        capture = self.device.capture
        event = Event(capture if capture is not None and self in capture.ops else None)
        self.device.give(self, ("record", event))
        return event

    def wait_event(self, event: Event) -> None:
        capture = self.device.capture
        if event.capture is not None:
            assert event.capture is capture, "an event of a capture is waited for outside of it"
            capture.ops.setdefault(self, [])
        elif capture is not None:
            assert self not in capture.ops, "an event of before a capture is waited for inside of it"
        self.device.give(self, ("wait", event))


class Rig:
    """A streamer over a device of lists."""

    def __init__(self, layers: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device = Device()
        cuda = SimpleNamespace(
            Stream=lambda _: Stream(device),
            stream=device.on,
            current_stream=lambda _: device.current,
            is_current_stream_capturing=lambda: device.capture is not None and device.current in device.capture.ops,
        )
        monkeypatch.setattr(gpu_feeds, "torch", SimpleNamespace(cuda=cuda))
        plan = StreamPlan(Demand((1,) * layers, 0), 0, tuple(range(layers)), slots, "RAM", 1.0)
        monkeypatch.setattr(gpu_feeds, "readable_in_place", lambda _: True)
        arena: Any = SimpleNamespace(pinned=True, on_gpu=lambda layer, _: layer, close=lambda: None)
        memory = [torch.zeros(1, dtype=torch.uint8) for _ in range(slots)]

        class Feed(CopyFeed):
            def load(self, layer: int, slot: int) -> None:
                self.slot = slot
                super().load(layer, slot)

            def _copy(self, target: Any, source: Any) -> None:
                device.give(device.current, ("copy", self.slot, source))

        self._parameter = torch.zeros(1)
        seats = [Seat(slot, weakref.ref(self._parameter), self._parameter.data_ptr()) for slot in plan.slot_of]
        self.plan = plan
        self.streamer = Streamer(plan, Budget("vram_budget_gib", 0), seats, Feed(arena, memory, [1] * layers))
        self.graphs: list[Capture] = []

    def layer(self, place: int) -> None:
        self.streamer.enter(place)
        self.device.give(self.device.current, ("compute", self.plan.slot_of[place], place))
        self.streamer.leave(place)

    def forward(self, until: int | None = None) -> None:
        layers = len(self.plan.streamed)
        for place in range(layers)[:until]:
            self.layer(place)
        if until is None:
            self.streamer.ended()

    # what the runner and a user do

    def plain_step(self) -> None:
        with self.streamer.sweep():
            self.forward()

    def broken_step(self, until: int) -> None:
        with pytest.raises(ZeroDivisionError), self.streamer.sweep():
            self.forward(until)
            raise ZeroDivisionError

    def capture_step(self, broken_after: int | None = None) -> None:
        """As `engine/graphs.py` does: captured and replayed, or, when the capture breaks, run plainly."""
        with self.streamer.sweep():
            self.streamer.begin()
            stream = Stream(self.device)
            self.device.capture = capture = Capture(stream)
            with self.device.on(stream):
                self.forward(broken_after)
            self.device.capture = None
            if broken_after is not None:
                self.forward()
                return
            capture.require_joined()
            self.graphs.append(capture)
            self._replay(capture)

    def replay_step(self) -> None:
        if self.graphs:
            with self.streamer.sweep():
                self.streamer.begin()
                self._replay(random.choice(self.graphs))

    def _replay(self, graph: Capture) -> None:
        self.device.give(self.device.current, ("graph", graph))

    def call_one_layer(self, place: int, stream: Stream) -> None:
        with self.device.on(stream):
            self.layer(place)

    # the device

    def execute(self, seed: int) -> int:
        """Run everything once; returns how many layers computed."""
        chooser = random.Random(seed)
        done: set[Any] = set()
        holds: dict[int, Any] = {}
        computed = 0
        running: list[Generator[bool, None, None]] = []

        def run(ops: list[Op], scope: Any) -> Generator[bool, None, None]:
            nonlocal computed
            for op in ops:
                if op[0] == "record":
                    done.add((scope if op[1].capture else None, op[1]))
                elif op[0] == "wait":
                    while (scope if op[1].capture else None, op[1]) not in done:
                        yield False
                elif op[0] == "copy":
                    holds[op[1]] = "half a layer"
                    yield True
                    holds[op[1]] = op[2]
                elif op[0] == "compute":
                    assert holds.get(op[1]) == op[2], "at its beginning"
                    yield True
                    assert holds.get(op[1]) == op[2], "at its end"
                    computed += 1
                else:
                    replay = object()
                    parts = [run(list(part), replay) for part in op[1].ops.values()]
                    running.extend(parts)
                    while any(part in running for part in parts):
                        yield False
                yield True

        running += [run(list(stream.ops), None) for stream in self.device.streams]
        idle = 0
        while running:
            one = chooser.choice(running)
            try:
                idle = 0 if next(one) else idle + 1
            except StopIteration:
                running.remove(one)
                idle = 0
            assert idle < 10_000, "everybody waits"
        return computed


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("layers", [4, 5, 6, 7])
def test_every_layer_computes_with_its_own_weights(layers: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(25):
        random.seed(seed)
        rig = Rig(layers, slots, monkeypatch)
        other = Stream(rig.device)
        deeds = [
            rig.plain_step,
            rig.capture_step,
            rig.replay_step,
            rig.replay_step,
            lambda rig=rig: rig.broken_step(random.randrange(1, layers)),
            lambda rig=rig: rig.capture_step(random.randrange(1, layers)),
            lambda rig=rig, other=other: rig.call_one_layer(random.randrange(layers), other),
            lambda rig=rig: rig.call_one_layer(random.randrange(layers), rig.device.current),
        ]
        for deed in random.choices(deeds, k=12):
            deed()
        assert max(rig.execute(order) for order in range(6)) > 0


def test_a_graph_copies_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(6, 2, monkeypatch)
    rig.capture_step()
    copies = [op[2] for ops in rig.graphs[0].ops.values() for op in ops if op[0] == "copy"]
    assert copies == [2, 3, 4, 5, 0, 1], "the last two are the first of the next sweep"


def test_the_device_of_lists_sees_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(6, 2, monkeypatch)
    monkeypatch.setattr(CopyFeed, "wait", lambda *_: None)
    rig.plain_step()
    with pytest.raises(AssertionError, match="at its beginning"):
        for order in range(20):
            rig.execute(order)
    monkeypatch.undo()
    rig = Rig(6, 2, monkeypatch)
    monkeypatch.setattr(CopyFeed, "settle", lambda *_: None)
    with pytest.raises(AssertionError, match=r"before a capture|nobody waits"):
        rig.plain_step()
        rig.capture_step()
    monkeypatch.undo()
    rig = Rig(6, 2, monkeypatch)
    rig.streamer._feed.used = lambda slot: None  # type: ignore[method-assign]
    rig.plain_step()
    rig.streamer._feed._free = [Event(None) for _ in range(2)]  # type: ignore[attr-defined]
    rig.capture_step()
    with pytest.raises(AssertionError):
        for order in range(20):
            rig.execute(order)
