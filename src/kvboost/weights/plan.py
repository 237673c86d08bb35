"""Which layers stay and which are streamed, decided before anything is loaded. Knows no torch.

A budget holds what always stays (embedding, head, norms), KV and workspace, a few slots that streamed layers pass
through in turn, and as many resident layers as still fit. Resident layers are spread evenly among the streamed ones, so
that what they compute hides copies everywhere alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.errors import ConfigError

GIB = 1 << 30

SLOTS = 2
"""One layer computes while the next arrives. While copies take longer than compute, the link is never idle with two: when a
layer has arrived, the one before it has long been computed. A third would even out layers of unequal compute, and costs
a resident layer."""


@dataclass(frozen=True)
class Demand:
    """What a model needs, in bytes, and where it may take it.

    layer_bytes: each decoder layer as one flat buffer. rest_bytes: all other weights that stay on the device.
    kv_bytes, workspace_bytes: the rest of the budget; 0 where the budget is for weights alone. host_bytes: weights that
    lie outside of the budget (an embedding that is read from the host).
    """

    layer_bytes: tuple[int, ...]
    rest_bytes: int
    kv_bytes: int = 0
    workspace_bytes: int = 0
    host_bytes: int = 0

    @property
    def whole_bytes(self) -> int:
        """Of the budget, with every layer resident."""
        return sum(self.layer_bytes) + self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        return self.rest_bytes + self.kv_bytes + self.workspace_bytes


@dataclass(frozen=True)
class StreamPlan:
    """The decision. Layers are numbered as in the model.

    streamed: in the order of execution; streamed layer i passes through slot `slot_of[i]`. link_bytes_per_s: of the
    link the streamed layers come over, as measured.
    """

    demand: Demand
    budget_bytes: int
    streamed: tuple[int, ...]
    slots: int
    link: str
    link_bytes_per_s: float

    @property
    def resident(self) -> tuple[int, ...]:
        streamed = set(self.streamed)
        return tuple(i for i in range(len(self.demand.layer_bytes)) if i not in streamed)

    @property
    def slot_bytes(self) -> int:
        """Of one slot: the largest streamed layer."""
        return max((self.demand.layer_bytes[i] for i in self.streamed), default=0)

    @property
    def slot_of(self) -> tuple[int, ...]:
        return slots_of(len(self.streamed), self.slots)

    @property
    def sweep_bytes(self) -> int:
        """Copied in each pass over the weights. A layer alone in its slot stays there."""
        slots = self.slot_of
        return sum(
            self.demand.layer_bytes[layer]
            for layer, slot in zip(self.streamed, slots, strict=True)
            if slots.count(slot) > 1
        )

    @property
    def used_bytes(self) -> int:
        """Of the budget."""
        resident = sum(self.demand.layer_bytes[i] for i in self.resident)
        return self.demand.fixed_bytes + resident + self.slots * self.slot_bytes

    @property
    def sweeps_per_s(self) -> float:
        """At most, by the link alone."""
        return self.link_bytes_per_s / self.sweep_bytes if self.sweep_bytes else float("inf")

    def describe(self) -> str:
        """What is printed before loading."""
        d = self.demand
        total = len(d.layer_bytes)
        if not self.streamed:
            return f"all {total} layers resident: {_gib(self.used_bytes)} of a budget of {_gib(self.budget_bytes)}"
        parts = [f"{_gib(d.rest_bytes)} embedding, head and norms"]
        parts += [f"{_gib(sum(d.layer_bytes[i] for i in self.resident))} resident layers"] if self.resident else []
        parts += [f"{_gib(self.slots * self.slot_bytes)} in {self.slots} slots"]
        parts += [f"{_gib(d.kv_bytes)} KV"] if d.kv_bytes else []
        parts += [f"{_gib(d.workspace_bytes)} workspace"] if d.workspace_bytes else []
        lines = [
            f"{len(self.resident)} of {total} layers resident, {len(self.streamed)} streamed from {self.link}",
            f"budget {_gib(self.budget_bytes)}: {', '.join(parts)}",
        ]
        if d.host_bytes:
            lines.append(f"beside it on the host: {_gib(d.host_bytes)} embedding")
        if self.sweep_bytes:
            lines.append(
                f"{_gib(self.sweep_bytes)} per sweep; at {self.link_bytes_per_s / 1e9:.1f} GB/s at most "
                f"{self.sweeps_per_s:.2f} sweeps/s, which is tokens/s of one sequence"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class StreamStats:
    """What a plan has come to, since the start.

    link_bytes_per_s: as measured before loading. stall_s: for how long the host waited for layers; where a GPU copies
    from RAM it waits by itself, and this is 0.
    """

    layers_resident: int
    layers_streamed: int
    sweep_bytes: int
    link_bytes_per_s: float
    loaded_bytes: int
    stall_s: float


def slots_of(streamed: int, slots: int) -> tuple[int, ...]:
    """The slot of each streamed layer: in turn, so that neighbours differ, where possible also across the seam."""
    turn = [i % slots for i in range(streamed)] if slots else []
    if slots > 2 and streamed > slots and streamed % slots == 1:
        turn[-1] = 1  # its successor is layer 0, in slot 0
    return tuple(turn)


def spread(total: int, streamed: int) -> tuple[int, ...]:
    """Which of `total` layers are the `streamed` ones, as evenly as whole numbers allow."""
    return tuple(i for i in range(total) if (i + 1) * streamed // total > i * streamed // total)


def plan_streaming(
    demand: Demand,
    budget_bytes: int,
    field: str,
    link: str = "the host",
    link_bytes_per_s: float = 0.0,
    remedy: str = "or use a smaller model",
    slots: int = SLOTS,
) -> StreamPlan:
    """The plan with the most resident layers that fit `budget_bytes`.

    field: what the user set, named in the `ConfigError` that says the least value that works. remedy: what else helps.
    """

    def plan(streamed: Sequence[int], slots: int) -> StreamPlan:
        return StreamPlan(demand, budget_bytes, tuple(streamed), slots, link, link_bytes_per_s)

    whole = plan((), 0)
    if whole.used_bytes <= budget_bytes:
        return whole
    total = len(demand.layer_bytes)
    least = whole
    for streamed in range(slots + 1, total + 1):  # as many as there are slots would all stay in them
        candidate = plan(spread(total, streamed), slots)
        if candidate.used_bytes <= budget_bytes:
            return candidate
        if candidate.used_bytes < least.used_bytes:
            least = candidate
    need = -(-least.used_bytes * 1000 // GIB) / 1000
    raise ConfigError(
        field,
        f"{_gib(budget_bytes)} is too little: {_gib(demand.fixed_bytes)} always stay ({_parts(demand)}), and {slots} slots "
        f"of {_gib(max(demand.layer_bytes))} are needed. Set {field}={need:.3f} at least, {remedy}.",
    )


def _parts(demand: Demand) -> str:
    parts = {"weights outside of layers": demand.rest_bytes, "KV": demand.kv_bytes, "workspace": demand.workspace_bytes}
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
