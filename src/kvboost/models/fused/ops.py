"""What fused modules compute with: one set of functions per machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kvboost.kernels.native.linear import Piece
from kvboost.kernels.norm import RmsNorm


class Product:
    """The weights of linears that share their input.

    pieces: rows of one kind each; their outputs lie side by side. native: `pieces` as the C++ kernels take them, made
    at first use.
    """

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces
        self.native: Any = None

    @property
    def n(self) -> int:
        return sum(piece.n for piece in self.pieces)

    @property
    def k(self) -> int:
        return self.pieces[0].k


class MixtureOps(Protocol):
    """What mixtures of experts compute with, where a machine has a faster way than torch's grouped product."""

    def tokens(self, top: int, experts: int) -> tuple[int, ...]:
        """Numbers of tokens, one for each way in which a mixture computes that gives every token `top` of its experts."""
        ...

    def experts(
        self, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`x [T, H]` through the experts `index [T, K]`, added up with `weights [T, K]`; gate_up `[E, 2I, H]` and down
        `[E, H, I]`. residual `[T, H]` is added to the rounded sum."""
        ...

    def route(self, logits: Tensor, top: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights in dtype and experts in int64, both `[T, top]`, of `logits [T, E]`: the largest of their softmax;
        renormalise: divided by their sum."""
        ...


class Ops(Protocol):
    """All tensors of one call have one dtype. Results round where Transformers' own modules round."""

    mixtures: MixtureOps | None

    def linear(self, x: Tensor, product: Product, norm: RmsNorm | None = None) -> Tensor:
        """`x[rows, k]`, normalised by `norm` if there is one, times the weights; `[rows, n]`."""
        ...

    def gated(self, x: Tensor, product: Product, activation: str, norm: RmsNorm | None = None) -> Tensor:
        """`activation(gate) * up`, `[rows, n]`, of what `linear` gives: gate `[rows, n]`, then up."""
        ...

    def linear_add(self, x: Tensor, product: Product, total: Tensor) -> Tensor:
        """`total[rows, n]` plus `linear(x, product)`, in the memory of `total`. Where one call does both, the product is not
        rounded before it is added."""
        ...

    def linear_add_norm(
        self, x: Tensor, product: Product, residual: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor, RmsNorm | None]:
        """`residual[rows, n]` plus `linear(x, product)` in other memory, and its norm. The norm is left to what takes it, where
        that may do it by the way: then the sum comes twice, with `norm`; else the sum, the normalised sum, and None."""
        ...

    def rms_norm(self, x: Tensor, norm: RmsNorm, out: Tensor | None = None) -> Tensor:
        """Each of `x[rows, groups, n]` normalised over n; `out` may be x."""
        ...

    def rotary_tables(
        self, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """cos and sin `[T, R]` of `positions [T] * inv_freq [R/2]`, times scaling; None: not faster than torch's own."""
        ...

    def compile_layer(self, layer: Any) -> Callable[..., Tensor | None] | None:
        """A faster `parts.Layer`, called with `(step, x, rotary)`, that answers None where it cannot serve."""
        ...
