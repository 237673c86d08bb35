"""The computations behind fused modules, and how each is read off a Transformers module.

`read(module, ...)` returns None when a module does not look like what the part computes; whether it truly is, only a
comparison on numbers decides (see `fuse.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvboost.kernels.norm import RmsNorm
from kvboost.models.fused.ops import Ops, Piece, Product
from kvboost.weights.modules import PackedLinear
from kvboost.weights.packing import Packing

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")

STEADY_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary types, by Transformers' names, whose frequencies do not change as a sequence grows."""


class PackedStep(Protocol):
    """A step that rotates, stores and attends from one fused product (see `NativeStep.attend_packed`)."""

    def attend_packed(
        self, layer_idx: int, qkv: Tensor, q_heads: int, rotary: tuple[Tensor, Tensor] | None, **options: Any
    ) -> Tensor: ...


@dataclass
class Held:
    """Weights and buffers a part computes with. `intact()` is False once someone has replaced or moved one of them."""

    entries: list[tuple[dict[str, Any], str, Tensor, int]] = field(default_factory=list)

    def add(self, module: nn.Module, name: str) -> Tensor:
        where: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        tensor: Tensor = where[name]
        self.entries.append((where, name, tensor, tensor.data_ptr()))
        return tensor.detach()

    def refresh(self) -> None:
        """Take the present addresses for good: the weights were moved on purpose."""
        self.entries = [(where, name, tensor, tensor.data_ptr()) for where, name, tensor, _ in self.entries]

    def intact(self) -> bool:
        for where, name, tensor, address in self.entries:
            if where.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        return True


class Linear:
    """One linear module, dense or packed, or several that share their input: rows of one packing lie one after the other
    in memory and are one piece of the product."""

    def __init__(self, linears: Sequence[nn.Linear | PackedLinear], held: Held) -> None:
        alike = itertools.groupby(linears, lambda x: (_packing(x), x.bias is None))
        self.product = Product(*(_piece(list(group), packing, held) for (packing, _), group in alike))

    @staticmethod
    def fits(linears: Sequence[Any]) -> bool:
        """Linears of one input size whose weights lie as their class made them."""
        return (
            all(type(x) in (nn.Linear, PackedLinear) and x.weight.is_contiguous() and not hooked(x) for x in linears)
            and len({x.in_features for x in linears}) == 1
        )

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear(x, self.product)


def _packing(linear: nn.Linear | PackedLinear) -> Packing | None:
    return linear.packing if isinstance(linear, PackedLinear) else None


def _piece(linears: list[nn.Linear | PackedLinear], packing: Packing | None, held: Held) -> Piece:
    weight = held.add(linears[0], "weight")
    bias = None if linears[0].bias is None else held.add(linears[0], "bias")
    for linear in linears[1:]:
        held.add(linear, "weight")
        if linear.bias is not None:
            held.add(linear, "bias")
    if len(linears) > 1:
        weight = _joined([linear.weight for linear in linears])
        bias = None if bias is None else _joined([linear.bias for linear in linears])
        held.refresh()
    return Piece(weight, bias, packing)


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, module: nn.Module, offset: float, held: Held) -> None:
        self.rms = RmsNorm(held.add(module, "weight"), _eps(module) or 0.0, offset)

    @staticmethod
    def candidates(module: nn.Module, held: Callable[[], Held]) -> list[tuple[Norm, Held]]:
        if not type(module).__name__.endswith("RMSNorm") or _eps(module) is None or hooked(module):
            return []
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 1 or not weight.is_contiguous() or len(module._parameters) != 1:
            return []
        found = []
        for offset in (0.0, 1.0):
            mine = held()
            found.append((Norm(module, offset, mine), mine))
        return found

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.rms_norm(x.unsqueeze(1), self.rms).squeeze(1)

    def heads(self, ops: Ops, part: Tensor) -> None:
        """Normalise the heads of `part[rows, heads * dim]` in place; a weight as wide as `part` takes them together."""
        n = self.rms.weight.numel()
        view = part.as_strided((part.shape[0], part.shape[1] // n, n), (part.stride(0), n, 1))
        ops.rms_norm(view, self.rms, out=view)


class Mlp:
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @staticmethod
    def read(module: nn.Module, held: Held) -> Mlp | None:
        children = module._modules
        if "gate_up_proj" in children:
            first = [children["gate_up_proj"]]
        else:
            first = [children.get("gate_proj"), children.get("up_proj")]
        down = children.get("down_proj")
        activation = activation_of(getattr(module, "act_fn", None) or getattr(module, "activation_fn", None))
        if activation is None or not Linear.fits(first) or not Linear.fits([down]):
            return None
        if len(first) == 2 and first[0].out_features != first[1].out_features:  # type: ignore[union-attr]
            return None
        return Mlp(Linear(first, held), Linear([down], held), activation)  # type: ignore[arg-type, list-item]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return self.down(ops, self._inner(ops, x))

    def add_to(self, ops: Ops, total: Tensor, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """`total` plus what a call gives, in the memory of `total`."""
        return ops.linear_add(self._inner(ops, x, norm), self.down.product, total)

    def _inner(self, ops: Ops, x: Tensor, norm: RmsNorm | None = None) -> Tensor:
        return ops.gated(x, self.gate_up.product, self.activation, norm)


class Attention:
    """q, k and v in one product, optional norms of q and k, rotary embedding, paged attention, output projection."""

    def __init__(self, module: nn.Module, qkv: Linear, out: Linear, norms: tuple[Norm | None, Norm | None]) -> None:
        self.layer_idx: int = module.layer_idx  # type: ignore[assignment]
        self.qkv, self.out, self.norms = qkv, out, norms
        self.q_heads = self.q_width = self.k_width = 0
        self.options: dict[str, Any] = {}

    @staticmethod
    def read(module: nn.Module, held: Held, norm_of: Callable[[nn.Module], Norm | None]) -> Attention | None:
        children = module._modules
        first = (
            [children["qkv_proj"]]
            if "qkv_proj" in children
            else [children.get(f"{name}_proj") for name in ("q", "k", "v")]
        )
        out = next((children[name] for name in ("o_proj", "dense", "out_proj") if name in children), None)
        if not isinstance(getattr(module, "layer_idx", None), int) or not Linear.fits(first) or not Linear.fits([out]):
            return None
        norms: list[Norm | None] = []
        for name in ("q_norm", "k_norm"):
            child = children.get(name)
            norms.append(None if child is None else norm_of(child))
            if child is not None and norms[-1] is None:
                return None
            if child is not None:
                held.add(child, "weight")
        return Attention(module, Linear(first, held), Linear([out], held), (norms[0], norms[1]))  # type: ignore[arg-type, list-item]

    def learn(self, q_heads: int, k_heads: int, dim: int, options: dict[str, Any]) -> None:
        """Take heads and options from a call that the module's own code made."""
        self.q_heads, self.q_width, self.k_width = q_heads, q_heads * dim, k_heads * dim
        self.options = options

    def __call__(self, ops: Ops, step: PackedStep, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.out(ops, self.heads(ops, step, x, rotary))

    def heads(
        self, ops: Ops, step: PackedStep, x: Tensor, rotary: tuple[Tensor, Tensor] | None, norm: RmsNorm | None = None
    ) -> Tensor:
        """What the output projection takes, `[rows, q_heads * v_dim]`; norm: of x."""
        qkv = ops.linear(x, self.qkv.product, norm)
        q_norm, k_norm = self.norms
        if q_norm is not None:
            q_norm.heads(ops, qkv[:, : self.q_width])
        if k_norm is not None:
            k_norm.heads(ops, qkv[:, self.q_width : self.q_width + self.k_width])
        out = step.attend_packed(self.layer_idx, qkv, self.q_heads, rotary, **self.options)
        return out.reshape(x.shape[0], -1)


class Rotary:
    """cos and sin of positions; models whose types of layers rotate differently have frequencies for each."""

    def __init__(self, by_layer_type: dict[str | None, tuple[Tensor, float]]) -> None:
        """Values: inverse frequencies `[R/2]` and the factor of cos and sin."""
        self._by_layer_type = by_layer_type

    @staticmethod
    def read(module: nn.Module, held: Held) -> Rotary | None:
        kinds = getattr(module, "rope_type", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or hooked(module):
            return None
        found: dict[str | None, tuple[Tensor, float]] = {}
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            prefix = "" if layer_type is None else f"{layer_type}_"
            inv_freq = module._buffers.get(f"{prefix}inv_freq")
            scaling = getattr(module, f"{prefix}attention_scaling", None)
            if kind not in STEADY_ROTARY or inv_freq is None or not isinstance(scaling, (int, float)):
                return None
            found[layer_type] = held.add(module, f"{prefix}inv_freq"), float(scaling)
        return Rotary(found)

    def __call__(
        self, ops: Ops, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`[.., R]` each, in the dtype of x, for `position_ids [..]`. None where the machine has no faster form."""
        inv_freq, scaling = self._by_layer_type[layer_type]
        tables = ops.rotary_tables(position_ids.reshape(-1), inv_freq, scaling, x.dtype)
        if tables is None:
            return None
        cos, sin = (table.view(*position_ids.shape, -1) for table in tables)
        return cos, sin


class FeedForward(Protocol):
    """What follows attention in a layer: an `Mlp`, or a mixture of experts."""

    def __call__(self, ops: Ops, x: Tensor) -> Tensor: ...

    def add_to(self, ops: Ops, total: Tensor, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """`total` plus what a call gives to x, normalised if there is a norm; it may be in the memory of `total`."""
        ...


class Layer:
    """A decoder layer that normalises before attention and before its MLP, each added to the residual."""

    def __init__(self, before: Norm, attention: Attention, between: Norm, mlp: FeedForward) -> None:
        self.before, self.attention, self.between, self.mlp = before, attention, between, mlp

    def __call__(self, ops: Ops, step: PackedStep, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        heads = self.attention.heads(ops, step, x, rotary, self.before.rms)
        total, inner, norm = ops.linear_add_norm(heads, self.attention.out.product, x, self.between.rms)
        return self.mlp.add_to(ops, total, inner, norm)


def _joined(parameters: Sequence[Any]) -> Tensor:
    """One tensor of all rows, of which each parameter becomes a view: one copy of the weights is kept."""
    first = parameters[0]
    rows = sum(p.shape[0] for p in parameters)
    adjacent = all(
        b.data_ptr() == a.data_ptr() + a.nbytes and b.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for a, b in itertools.pairwise(parameters)
    )
    if adjacent:
        shape = (rows, *first.shape[1:])
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())
    whole = torch.cat([p.detach() for p in parameters])
    if whole.is_cuda:  # products read weights ahead of the kernel before them (kernels/cuda/driver.py)
        torch.cuda.synchronize(whole.device)
    at = 0
    for parameter in parameters:
        parameter.data = whole[at : at + parameter.shape[0]]
        at += parameter.shape[0]
    return whole


def _eps(module: nn.Module) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(eps) if isinstance(eps, (int, float)) else None


def hooked(module: nn.Module) -> bool:
    """Whether someone listens to calls of the module, which a fused form would not make. The streamer's hooks, around
    whole layers, are called all the same and change nothing."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(not getattr(hook, "transparent", False) for hook in hooks)


def activation_of(function: Any) -> str | None:
    """Which of `ACTIVATIONS` a module computes, found out by trying."""
    if function is None:
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    own = {
        "silu": nn.functional.silu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "gelu": nn.functional.gelu(x),
        "relu": nn.functional.relu(x),
    }
    try:
        theirs = function(x)
    except Exception:  # whatever a foreign activation raises, it is not one of ours
        return None
    return next((name for name in ACTIVATIONS if torch.allclose(own[name], theirs, atol=1e-9)), None)
