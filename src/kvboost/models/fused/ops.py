"""What fused modules compute with: one set of functions per machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Ops(Protocol):
    """All tensors of one call have one dtype. Results round where Transformers' own modules round."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x[rows, k] @ weight[n, k].T + bias[n]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor | None = None) -> Tensor:
        """Each of `x[rows, groups, n]` normalised over n, times `weight[n] + offset`; `out` may be x."""
        ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """`x + delta`, and the norm of it; both `[rows, n]`."""
        ...

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up` of `gate_up[rows, 2n]`; `[rows, n]`."""
        ...

    def compile_layer(self, layer: Any) -> Callable[..., Tensor | None] | None:
        """A faster `parts.Layer`, called with `(step, x, rotary)`, that answers None where it cannot serve."""
        ...
