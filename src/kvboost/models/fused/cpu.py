"""Fused modules on a CPU, by the compiled C++ kernels. All tensors of a call are fp32, or all are bf16."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvboost.kernels.native.library import ACTIVATIONS, Layer, NormWeight, Weight, load
from kvboost.models.fused import parts

DOT_ROWS_MAX = 16
"""Rows up to which dot products along k beat a blocked product in fp32 (33 against 37 ms for SmolLM2 at 16 rows)."""

AMX_ROWS_MAX = 512
"""Rows up to which AMX over the weight as it lies beats oneDNN, which packs it first (bf16: 37 against 47 ms at 256
rows, 153 against 128 ms at 1,050)."""


class CpuOps:
    """See `Ops`."""

    def __init__(self) -> None:
        self._lib = load()
        self._amx = bool(self._lib.kvb_has_amx())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x[rows, k] @ weight[n, k].T + bias[n]`, `[rows, n]`. weight contiguous."""
        rows, (n, k) = x.shape[0], weight.shape
        if not 0 < rows <= self.rows_max(x.dtype, n, k) or x.stride(1) != 1:
            return torch.nn.functional.linear(x, weight, bias)
        out = x.new_empty(rows, n)
        self._lib.kvb_linear(
            x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), rows, n, k, _threads(),
        )  # fmt: skip
        return out

    def rows_max(self, dtype: torch.dtype, n: int, k: int) -> int:
        """Rows up to which our product of a weight `[n, k]` is the fastest."""
        if dtype == torch.float32:
            return DOT_ROWS_MAX
        return AMX_ROWS_MAX if self._amx and n % 32 == 0 and k % 32 == 0 else 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor | None = None) -> Tensor:
        """Normalise each of `x[rows, groups, n]` over n and scale by `weight[n] + offset`. Groups lie n apart.

        `out` may be x itself.
        """
        rows, groups, n = x.shape
        if out is None:
            out = x.new_empty(rows, groups, n)
        self._lib.kvb_rms_norm(
            x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0),
            rows, groups, n, eps, offset, _threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """`x + delta`, and the norm of it. `[rows, n]`, contiguous."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._lib.kvb_add_rms_norm(
            x.dtype == torch.bfloat16, x.data_ptr(), delta.data_ptr(), weight.data_ptr(), total.data_ptr(),
            out.data_ptr(), *x.shape, eps, offset, _threads(),
        )  # fmt: skip
        return total, out

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up` of `gate_up[rows, 2n]`, gate first; `[rows, n]`."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, n)
        self._lib.kvb_gate(
            gate_up.dtype == torch.bfloat16, gate_up.data_ptr(), out.data_ptr(), rows, n, ACTIVATIONS[activation],
            _threads(),
        )  # fmt: skip
        return out

    def compile_layer(self, layer: parts.Layer) -> CpuLayer:
        """The layer as one call."""
        return CpuLayer(self, layer)


class CpuLayer:
    """A decoder layer as one call into C++, for steps of few rows; None is answered to larger ones."""

    def __init__(self, ops: CpuOps, layer: parts.Layer) -> None:
        self._lib = load()
        self._layer_idx = layer.attention.layer_idx
        attention, mlp = layer.attention, layer.mlp
        options = attention.options
        products = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        self._is_bf16 = attention.qkv.weight.dtype == torch.bfloat16
        self._rows_max = min(ops.rows_max(p.weight.dtype, *p.weight.shape) for p in products)
        sinks = options["s_aux"]
        self._kept = (layer, None if sinks is None else sinks.float().contiguous())
        self._struct = Layer(
            hidden=attention.qkv.weight.shape[1],
            inner=mlp.down.weight.shape[1],
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
            **dict(zip(("qkv", "out", "gate_up", "down"), map(_weight, products), strict=True)),
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
    return NormWeight(norm.weight.data_ptr(), norm.eps, norm.offset, norm.weight.numel())


def _weight(linear: parts.Linear) -> Weight:
    return Weight(linear.weight.data_ptr(), _address(linear.bias))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()
