"""Shared by the tests of experts: routings of all kinds, and what experts must make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
"""Transformers' names of ours."""


@dataclass(frozen=True)
class Mixture:
    """A layer of experts and what it is given. routing: `random`, `one` expert for all that it can, or `uneven`."""

    tokens: int
    top: int
    experts: int
    hidden: int
    inner: int
    routing: str = "random"
    activation: str = "silu"

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.top} of {self.experts}, {self.hidden}x{self.inner}"
        return f"{sizes} {self.routing} {self.activation}"


def routing(case: Mixture, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """index `[T, K]`, different within a token, and weights `[T, K]` in float32 that add up to 1."""
    scores = torch.randn(case.tokens, case.experts, device=device)
    if case.routing == "one":
        scores[:, case.experts // 2] += 100
    if case.routing == "uneven":  # the first experts and the last get none, others very different numbers
        scores += torch.linspace(4, -4, case.experts, device=device)
        scores[:, [0, case.experts - 1]] -= 100
    values, index = scores.topk(case.top, dim=-1)
    return index, values.softmax(-1)


def build(case: Mixture, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `routed_experts`."""
    index, weights = routing(case, device)
    x = torch.randn(case.tokens, case.hidden, device=device)
    gate_up = torch.randn(case.experts, 2 * case.inner, case.hidden, device=device) * case.hidden**-0.5
    down = torch.randn(case.experts, case.hidden, case.inner, device=device) * case.inner**-0.5
    tensors = {"x": x, "weights": weights, "gate_up": gate_up, "down": down}
    return {**{k: v.to(dtype) for k, v in tensors.items()}, "index": index, "activation": case.activation}


def expected(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """In float64, one pair after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    act = ACT2FN[ACTIVATIONS[activation]]
    for expert in index.unique().tolist():
        token, choice = torch.where(index == expert)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
        part = (act(gate) * up) @ down[expert].double().T
        out.index_add_(0, token, part * weights[token, choice, None].double())
    return out


def check_route(logits: Tensor, top: int, renormalise: bool) -> None:
    """The choice is that of a stable sort of the softmax, on any device; weights within rounding of float32."""
    from kvboost.kernels.triton.router import route

    probability = logits.float().softmax(-1)
    values, order = probability.sort(dim=-1, descending=True, stable=True)
    values = values[:, :top] / (values[:, :top].sum(-1, keepdim=True) if renormalise else 1.0)
    weights, index = route(logits, top, renormalise, torch.float32)
    assert index.dtype == torch.int64 and index.device == logits.device
    assert torch.equal(index, order[:, :top])
    torch.testing.assert_close(weights, values, rtol=1e-5, atol=1e-9)
    rounded = route(logits, top, renormalise, logits.dtype)[0]
    assert torch.equal(rounded, weights.to(logits.dtype))
