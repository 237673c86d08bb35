"""Fused modules on a CPU, by the compiled C++ kernels. All tensors of a call are fp32, or all are bf16."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvboost.kernels.native import linear as native
from kvboost.kernels.native.library import ACTIVATIONS, Layer, NormWeight, load
from kvboost.kernels.norm import RmsNorm
from kvboost.models.fused import parts
from kvboost.models.fused.ops import MixtureOps, Piece, Product
from kvboost.weights.compute import packed_linear


class CpuOps:
    """See `Ops`."""

    mixtures: MixtureOps | None = None

    def __init__(self) -> None:
        self._lib = load()

    def linear(self, x: Tensor, product: Product, norm: RmsNorm | None = None) -> Tensor:
        """`x[rows, k]`, normalised by `norm` if there is one, times the weights; `[rows, n]`."""
        if norm is not None:
            x = self.rms_norm(x.unsqueeze(1), norm).squeeze(1)
        if 0 < x.shape[0] <= native.rows_max(x.dtype, product.pieces) and x.stride(1) == 1:
            if product.native is None:
                product.native = native.weights_of(product.pieces, x.dtype)
            return native.linear(x, product.native)
        outs = [_many_rows(x, piece) for piece in product.pieces]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def rms_norm(self, x: Tensor, norm: RmsNorm, out: Tensor | None = None) -> Tensor:
        """Normalise each of `x[rows, groups, n]` over n. Groups lie n apart.

        `out` may be x itself.
        """
        rows, groups, n = x.shape
        if out is None:
            out = x.new_empty(rows, groups, n)
        self._lib.kvb_rms_norm(
            x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), norm.weight.data_ptr(), out.data_ptr(),
            out.stride(0), rows, groups, n, norm.eps, norm.offset, _threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """`x + delta`, and the norm of it. `[rows, n]`, contiguous."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._lib.kvb_add_rms_norm(
            x.dtype == torch.bfloat16, x.data_ptr(), delta.data_ptr(), norm.weight.data_ptr(),
            total.data_ptr(), out.data_ptr(), *x.shape, norm.eps, norm.offset, _threads(),
        )  # fmt: skip
        return total, out

    def linear_add(self, x: Tensor, product: Product, total: Tensor) -> Tensor:
        return total.add_(self.linear(x, product))

    def linear_add_norm(
        self, x: Tensor, product: Product, residual: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor, None]:
        return *self.add_rms_norm(residual, self.linear(x, product), norm), None

    def gated(self, x: Tensor, product: Product, activation: str, norm: RmsNorm | None = None) -> Tensor:
        return self.gate(self.linear(x, product, norm), activation)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up` of `gate_up[rows, 2n]`, gate first; `[rows, n]`."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, n)
        self._lib.kvb_gate(
            gate_up.dtype == torch.bfloat16, gate_up.data_ptr(), out.data_ptr(), rows, n, ACTIVATIONS[activation],
            _threads(),
        )  # fmt: skip
        return out

    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> None:
        """None: nine small operations are nothing beside a step here."""
        return None

    def compile_layer(self, layer: parts.Layer) -> CpuLayer | None:
        """The layer as one call."""
        return CpuLayer(layer, layer.mlp) if isinstance(layer.mlp, parts.Mlp) else None


class CpuLayer:
    """A decoder layer as one call into C++, for steps of few rows; None is answered to larger ones."""

    def __init__(self, layer: parts.Layer, mlp: parts.Mlp) -> None:
        """mlp: that of the layer."""
        self._lib = load()
        self._layer_idx = layer.attention.layer_idx
        attention = layer.attention
        options = attention.options
        dtype = layer.before.rms.weight.dtype
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        weights = [native.weights_of(linear.product.pieces, dtype) for linear in linears]
        self._is_bf16 = dtype == torch.bfloat16
        self._rows_max = min(native.rows_max(dtype, linear.product.pieces) for linear in linears)
        sinks = options["s_aux"]
        self._kept = (layer, None if sinks is None else sinks.float().contiguous())
        self._struct = Layer(
            hidden=attention.qkv.product.k,
            inner=mlp.down.product.k,
            q_heads=attention.q_heads,
            kv_heads=options["k_heads"],
            dim=attention.q_width // attention.q_heads,
            v_dim=options["v_dim"],
            activation=ACTIVATIONS[mlp.activation],
            window=options["sliding_window"] or 0,
            scaling=(attention.q_width // attention.q_heads) ** -0.5
            if options["scaling"] is None
            else options["scaling"],
            softcap=options["softcap"] or 0.0,
            sinks=_address(self._kept[1]),
            before=_norm(layer.before),
            between=_norm(layer.between),
            q_norm=_norm(attention.norms[0]),
            k_norm=_norm(attention.norms[1]),
            **dict(zip(("qkv", "out", "gate_up", "down"), weights, strict=True)),
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(self, step: Any, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """x `[rows, hidden]`, contiguous."""
        if x.shape[0] > self._rows_max or not hasattr(step, "arguments"):
            return None
        out = torch.empty_like(x)
        self._lib.kvb_layer(
            self._is_bf16, self._address, step.arguments(self._layer_idx, rotary), x.data_ptr(), out.data_ptr(),
            _threads(),
        )  # fmt: skip
        return out


def _norm(norm: parts.Norm | None) -> NormWeight:
    if norm is None:
        return NormWeight()
    rms = norm.rms
    return NormWeight(rms.weight.data_ptr(), rms.eps, rms.offset, rms.weight.numel())


def _many_rows(x: Tensor, piece: Piece) -> Tensor:
    if piece.packing is not None:
        return packed_linear(x, piece.weight, piece.packing, piece.bias)
    return torch.nn.functional.linear(x, piece.weight, piece.bias)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()
