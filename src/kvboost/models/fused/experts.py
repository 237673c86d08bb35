"""Mixtures of experts as Transformers' modules hold them: routers, and experts in two stacked weights; proved like `parts`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvboost.kernels.norm import RmsNorm
from kvboost.models.fused.ops import MixtureOps, Ops, Piece, Product
from kvboost.models.fused.parts import Held, activation_of, hooked

PLAIN = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
         "has_post_expert_norm": False, "_is_expert_parallel": False}  # fmt: skip
"""What Transformers notes on modules of experts (`transformers.integrations.moe`) where they are of the common kind."""


class Experts:
    """`sum of weight * down(activation(gate(x)) * up(x))` over the experts that a router chose for each token."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: str, by: MixtureOps) -> None:
        """gate_up `[E, 2I, H]`, gate first; down `[E, H, I]`."""
        self.gate_up, self.down, self.activation, self.by = gate_up, down, activation, by

    @staticmethod
    def read(module: nn.Module, held: Held, by: MixtureOps) -> Experts | None:
        if set(module._parameters) != {"gate_up_proj", "down_proj"} or not set(module._modules) <= {"act_fn"}:
            return None
        gate = getattr(type(module), "_apply_gate", None)
        if (
            getattr(gate, "__module__", None) != "transformers.integrations.moe"
        ):  # a gate of its own: clipped, or scaled
            return None
        if module._buffers or hooked(module) or any(getattr(module, k, v) is not v for k, v in PLAIN.items()):
            return None
        gate_up, down = module._parameters["gate_up_proj"], module._parameters["down_proj"]
        activation = activation_of(getattr(module, "act_fn", None))
        if activation is None or gate_up is None or down is None or not (gate_up.dim() == down.dim() == 3):
            return None
        count, hidden, inner = down.shape
        if gate_up.shape != (count, 2 * inner, hidden) or not (gate_up.is_contiguous() and down.is_contiguous()):
            return None
        return Experts(held.add(module, "gate_up_proj"), held.add(module, "down_proj"), activation, by)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """`[T, H]` of `[T, H]`, `[T, K]` and `[T, K]`, which have the names of the module's arguments."""
        return self.by.experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up, self.down, self.activation, residual
        )

    def trials(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Iterator[Any]:
        """Random arguments like those of a call, of as many tokens as the machine has ways to compute."""
        count, width = self.gate_up.shape[0], hidden_states.shape[1]
        top, device = top_k_index.shape[1], hidden_states.device
        scale = hidden_states.float().square().mean().sqrt()
        generator = torch.Generator().manual_seed(0)
        for tokens in self.by.tokens(top, count):
            x = torch.randn(tokens, width, generator=generator).to(device) * scale
            scores, index = torch.randn(tokens, count, generator=generator).topk(top, dim=-1)
            weights = scores.softmax(-1).to(device, top_k_weights.dtype)
            yield x.to(hidden_states.dtype), index.to(device, top_k_index.dtype), weights


ROUTER_TRIAL_TOKENS = 64


class Router:
    """A linear layer, softmax over the experts in float32, the largest few, and in most models their sum made 1."""

    def __init__(self, weight: Tensor, top: int, renormalise: bool, by: MixtureOps) -> None:
        """weight `[E, H]`."""
        self.by = by
        self.product, self.top, self.renormalise = Product(Piece(weight, None, None)), top, renormalise
        self.weights_in = weight.dtype
        """Of the weights of experts: Mixtral keeps float32, others round to the model's dtype."""

    @staticmethod
    def read(module: nn.Module, held: Held, by: MixtureOps) -> Router | None:
        top = getattr(module, "top_k", None)
        if not type(module).__name__.endswith("TopKRouter") or hooked(module) or not isinstance(top, int):
            return None
        if set(module._parameters) != {"weight"} or module._buffers or module._modules:
            return None
        weight = module._parameters["weight"]
        if weight is None or weight.dim() != 2 or not weight.is_contiguous():
            return None
        return Router(held.add(module, "weight"), top, bool(getattr(module, "norm_topk_prob", True)), by)

    def learn(self, answer: Any) -> None:
        """Take the dtype of weights from an answer of the module's own code."""
        if self.logits_of(answer) is not None:
            self.weights_in = answer[1].dtype

    def __call__(self, ops: Ops, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[T, E]`, weights `[T, K]` and experts `[T, K]` of `x [.., H]`."""
        logits = ops.linear(x.reshape(-1, x.shape[-1]), self.product)
        return logits, *self.by.route(logits, self.top, self.renormalise, self.weights_in)

    def trials(self, x: Tensor) -> Iterator[Tensor]:
        """Inputs of many tokens like x; and on a GPU one that makes all experts equal, where torch takes the first ones."""
        generator = torch.Generator().manual_seed(0)
        scale = x.float().square().mean().sqrt()
        many = torch.randn(ROUTER_TRIAL_TOKENS, x.shape[-1], generator=generator)
        yield (many.to(x.device) * scale).to(x.dtype)
        if x.is_cuda:
            yield torch.zeros_like(x)

    def logits_of(self, answer: Any) -> Tensor | None:
        """The logits of a router's answer; None: it is not one, or of another kind."""
        if not isinstance(answer, tuple) or len(answer) != 3 or not all(isinstance(x, Tensor) for x in answer):
            return None
        logits, weights, index = answer
        alike = weights.shape == index.shape == (logits.shape[0], self.top) and index.dtype == torch.int64
        return logits if alike else None

    def choice_of(self, answer: Any) -> Tensor | None:
        """`[T, E]`: each expert's weight, whatever the order in which they were chosen."""
        logits = self.logits_of(answer)
        if logits is None:
            return None
        _, weights, index = answer
        return weights.new_zeros(logits.shape).scatter(1, index, weights)


class Mixture:
    """A router and its experts, and nothing beside them; it stands where a layer has an `Mlp`."""

    def __init__(self, router: Router, experts: Experts) -> None:
        self.router, self.experts = router, experts

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _, weights, index = self.router(ops, x)
        return self.experts(x, index, weights, residual)

    def add_to(self, ops: Ops, total: Tensor, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """`total` plus what a call gives, normalised first if there is a norm: router and experts take the same."""
        return self(ops, x if norm is None else ops.rms_norm(x.unsqueeze(1), norm).squeeze(1), total)
