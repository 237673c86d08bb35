"""What the engine counts, as one snapshot. Plain data; knows no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvboost.engine.scheduler import Scheduler
from kvboost.weights.plan import StreamStats


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start, and the pool as it is now. Tokens unless the name says blocks, slots or requests.

    `prefix_hits_tokens / prefix_queries_tokens` is the hit rate over prompts; `kv_slots_used / kv_slots_allocated` is
    the share of referenced token slots that hold a token (waste is at most one block per running sequence).
    """

    num_running: int
    num_waiting: int
    num_requests_finished: int
    num_steps: int
    num_preemptions: int
    blocks_total: int
    blocks_referenced: int
    blocks_cached: int
    blocks_free: int
    blocks_pinned: int
    kv_slots_allocated: int
    kv_slots_used: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    weights: StreamStats | None = None
    """What streaming has done; None when all weights are resident."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens whose KV was found."""
        return self.prefix_hits_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else 0.0

    @property
    def kv_utilization(self) -> float:
        return self.kv_slots_used / self.kv_slots_allocated if self.kv_slots_allocated else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate, "kv_utilization": self.kv_utilization}


def read_stats(scheduler: Scheduler, weights: StreamStats | None) -> EngineStats:
    """Call between two steps. weights: of the runner."""
    counters, pool = scheduler.counters, scheduler.pool
    allocated, used = scheduler.slots()
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_requests_finished=counters.finished_requests,
        num_steps=counters.steps,
        num_preemptions=counters.preemptions,
        blocks_total=pool.num_blocks,
        blocks_referenced=pool.num_referenced,
        blocks_cached=pool.num_cached,
        blocks_free=pool.num_free,
        blocks_pinned=scheduler.num_pinned,
        kv_slots_allocated=allocated,
        kv_slots_used=used,
        prefix_queries_tokens=counters.prefix_queries,
        prefix_hits_tokens=counters.prefix_hits,
        prompt_tokens=counters.prompt_tokens,
        computed_tokens=counters.computed_tokens,
        output_tokens=counters.output_tokens,
        weights=weights,
    )
