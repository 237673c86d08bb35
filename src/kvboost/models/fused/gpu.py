"""Fused modules on a GPU, by Triton kernels and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvboost.kernels.cuda import packed_few
from kvboost.kernels.norm import RmsNorm
from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from kvboost.kernels.triton.experts import routed_experts, tokens_of_each_tile
from kvboost.kernels.triton.rotary_tables import rotary_tables
from kvboost.kernels.triton.router import route
from kvboost.kernels.triton.skinny import faster_than_cublas, skinny_linear
from kvboost.models.fused.ops import MixtureOps, Piece, Product
from kvboost.weights.compute import packed_linear


class GpuMixtures:
    """See `MixtureOps`."""

    def tokens(self, top: int, experts: int) -> tuple[int, ...]:
        return tokens_of_each_tile(top, experts)

    def experts(
        self, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return routed_experts(x, index, weights, gate_up, down, activation, residual)

    def route(self, logits: Tensor, top: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return route(logits, top, renormalise, dtype)


class GpuOps:
    """See `Ops`. Everything can be captured in a CUDA graph."""

    mixtures: MixtureOps | None = GpuMixtures()

    def linear(self, x: Tensor, product: Product, norm: RmsNorm | None = None) -> Tensor:
        if norm is not None:
            few = _by_few(x, product, norm=norm)
            return self.linear(_normed(x, norm), product) if few is None else few()
        parts = [_piece(x, piece) for piece in product.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def gated(self, x: Tensor, product: Product, activation: str, norm: RmsNorm | None = None) -> Tensor:
        if (few := _by_few(x, product, norm=norm, activation=activation)) is not None:
            return few()
        if norm is not None:
            return self.gated(_normed(x, norm), product, activation)
        return act_mul(self.linear(x, product), activation)

    def linear_add(self, x: Tensor, product: Product, total: Tensor) -> Tensor:
        if (few := _by_few(x, product)) is not None:
            return few(total=total)
        weight, bias, packing = product.pieces[0]
        if packing is None and len(product.pieces) == 1 and faster_than_cublas(x, weight):
            return skinny_linear(x, weight, bias, total=total)
        if len(product.pieces) > 1 or bias is not None or packing is not None:
            return total.add_(self.linear(x, product))
        return torch.addmm(total, x, weight.T, out=total)

    def linear_add_norm(
        self, x: Tensor, product: Product, residual: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor, RmsNorm | None]:
        if residual.is_contiguous() and (few := _by_few(x, product)) is not None:
            total = few(total=residual, out=torch.empty_like(residual))
            return total, total, norm
        normed, total = add_rms_norm(
            self.linear(x, product), residual, norm.weight, norm.eps,
            weight_offset=norm.offset, round_first=norm.round_first,
        )  # fmt: skip
        return total, normed, None

    def rms_norm(self, x: Tensor, norm: RmsNorm, out: Tensor | None = None) -> Tensor:
        return _normed(x, norm, out)

    def rotary_tables(
        self, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, inv_freq, scaling, dtype)

    def compile_layer(self, layer: Any) -> None:
        """None: a CUDA graph makes one launch of the whole step."""
        return None


def _by_few(x: Tensor, product: Product, **around: Any) -> Callable[..., Tensor] | None:
    """The product by `packed_few`, with what is computed around it, or None where that does not serve it."""
    weight, bias, packing = product.pieces[0]
    if len(product.pieces) > 1 or packing is None or not packed_few.serves(x, weight, packing, bias, **around):
        return None
    return partial(packed_few.packed_few, x, weight, packing, bias, **around)


def _normed(x: Tensor, norm: RmsNorm, out: Tensor | None = None) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, round_first=norm.round_first, out=out)


def _piece(x: Tensor, piece: Piece) -> Tensor:
    """cuBLAS for dense weights, but our own product where it was measured faster for this shape."""
    weight, bias, packing = piece
    if packing is not None:
        return packed_linear(x, weight, packing, bias)
    if faster_than_cublas(x, weight):
        return skinny_linear(x, weight, bias)
    return linear(x, weight, bias)
