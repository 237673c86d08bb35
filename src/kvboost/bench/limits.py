"""Lower bounds on time, from the model's size and what the device was measured to do. Attention itself is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvboost.bench.machine import Limits
from kvboost.weights.sizes import WeightSize, parameter_sizes, total


@dataclass(frozen=True)
class ModelCost:
    """weight_bytes: read once per step. flops_per_token: two per weight of the layers; head_flops: per row of logits."""

    weight_bytes: int
    flops_per_token: float
    head_flops: float

    @classmethod
    def of(cls, model: Any) -> ModelCost:
        """Counts tied input and output embeddings once, as the head; an embedding look-up costs nothing."""
        sizes = parameter_sizes(model)
        sizes.pop(model.get_input_embeddings().weight, None)
        head = model.get_output_embeddings()
        tied = WeightSize(0, 0) if head is None else parameter_sizes(head)[head.weight]
        if head is not None:
            sizes.pop(head.weight, None)
        layers = total(sizes)
        return cls(layers.nbytes + tied.nbytes, 2.0 * layers.weights, 2.0 * tied.weights)

    def step_s(self, limits: Limits, tokens: int, logits: int = 1) -> float:
        """One pass over `tokens` tokens: the slower of reading the weights and multiplying with them."""
        flops = self.flops_per_token * tokens + self.head_flops * logits
        return max(self.weight_bytes / limits.read_bytes_per_s, flops / limits.flops_per_s)

    def prefill_text(self, limits: Limits, tokens: int) -> str:
        """The bound on TTFT for `tokens` computed tokens, in words."""
        seconds = self.step_s(limits, tokens)
        return f"{tokens:,} computed tokens take at least {seconds * 1e3:,.1f} ms ({describe(limits)})"

    def batch_text(self, limits: Limits, sequences: int, prefill_tokens: int, new_tokens: int) -> str:
        """The bound on output tokens/s of a batch, in words."""
        seconds = self.step_s(limits, prefill_tokens, sequences)
        seconds += (new_tokens - 1) * self.step_s(limits, sequences, sequences)
        return f"at most {sequences * new_tokens / seconds:,.0f} output tokens/s ({describe(limits)})"


def describe(limits: Limits) -> str:
    return (
        f"{limits.read_bytes_per_s / 1e9:,.1f} GB/s read, {limits.flops_per_s / 1e9:,.0f} GFLOP/s, both measured here"
    )
