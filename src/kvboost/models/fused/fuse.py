"""Finds modules that have a fused form, proves each on numbers, and puts it in for engine steps.

The model runs a few tokens twice, at near and at far positions, and every candidate is given what its module was
given: small and large inputs alike. Only a form that answers as the module did is put in. Outside of engine steps, and
as soon as someone replaces a weight, the module's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.attention.step import running
from kvboost.models.fused.experts import Experts, Mixture, Router
from kvboost.models.fused.ops import Ops
from kvboost.models.fused.parts import Attention, FeedForward, Held, Layer, Linear, Mlp, Norm, Rotary, hooked
from kvboost.models.fused.proof import LARGE, Call, Fused, equal, observe, own_forward, same_tables
from kvboost.models.fused.reference import ReferenceStep
from kvboost.weights.streamer import streamer_of


def fuse(model: PreTrainedModel, ops: Ops, positions_below: int) -> dict[str, int]:
    """Put fused forms into `model`, whose attention is attached; returns how many of each kind.

    positions_below: positions the model serves; the probe goes up to the last one.
    """
    unfuse(model)
    with torch.no_grad():  # not inference mode: weights move here, and the model may be trained later
        calls = observe(model, positions_below)
        builder = _Builder(model, ops, calls)
        builder.run()
    return builder.counts


def unfuse(model: nn.Module) -> None:
    """Give every module its class's own forward back."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Fused) or forward == own_forward(module):
            del vars(module)["forward"]


class _Builder:
    """Goes through the model from the leaves up: norms, MLPs and attention, then whole layers, then what is left."""

    def __init__(self, model: PreTrainedModel, ops: Ops, calls: dict[nn.Module, list[Call]]) -> None:
        self._model, self._ops, self._calls = model, ops, calls
        self._norms: dict[nn.Module, Norm] = {}
        self._mlps: dict[nn.Module, FeedForward] = {}
        self._routers: dict[nn.Module | None, Router] = {}
        self._experts_of: dict[nn.Module | None, Experts] = {}
        self._attentions: dict[nn.Module, Attention] = {}
        self._held: dict[nn.Module, Held] = {}
        self._covered: set[nn.Module] = set()
        self.counts = {
            "layers": 0,
            "attention": 0,
            "mlp": 0,
            "experts": 0,
            "routers": 0,
            "mixtures": 0,
            "norms": 0,
            "linears": 0,
            "rotary": 0,
        }

    def run(self) -> None:
        streamer = streamer_of(self._model)
        rest = [m for m in self._model.modules() if "forward" not in vars(m)]
        for layer in [] if streamer is None else streamer.layers():
            mine = set(layer.modules())
            with streamer.present(layer):  # type: ignore[union-attr]
                self._fuse([m for m in rest if m in mine])
            rest = [m for m in rest if m not in mine]
        self._fuse(rest)

    def _fuse(self, modules: list[nn.Module]) -> None:
        for module in modules:
            self._norm(module)
        for module in modules:
            self._mlp(module)
            self._attention(module)
            self._experts(module)
            self._router(module)
        for module in modules:
            self._mixture(module)
        for module in modules:
            self._layer(module)
        for module in modules:
            self._linear(module)
            self._tables(module)

    def _norm(self, module: nn.Module) -> None:
        ops = self._ops
        for norm, held in Norm.candidates(module, Held):

            def answer(step: Any, args: Any, kwargs: Any, norm: Norm = norm) -> Tensor:
                x = _input(args, kwargs)
                return norm(ops, x.reshape(-1, x.shape[-1])).view(x.shape)

            if self._put(module, held, answer, "norms"):
                self._norms[module] = norm
                return

    def _mlp(self, module: nn.Module) -> None:
        held = Held()
        mlp = Mlp.read(module, held) if module in self._calls else None
        if mlp is None:
            return
        ops = self._ops

        def answer(step: Any, args: Any, kwargs: Any) -> Tensor:
            x = _input(args, kwargs)
            return mlp(ops, x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)

        if self._put(module, held, answer, "mlp"):
            self._mlps[module] = mlp
            self._covered.update(module.children())

    def _experts(self, module: nn.Module) -> None:
        held = Held()
        by = self._ops.mixtures
        experts = Experts.read(module, held, by) if by is not None and module in self._calls else None
        if experts is None or not self._calls[module][-1].gives("hidden_states", "top_k_index", "top_k_weights"):
            return
        call = self._calls[module][-1]

        def answer(step: Any, args: Any, kwargs: Any) -> Tensor:
            return experts(*args, **kwargs)

        trials = [Call(inputs, {}) for inputs in experts.trials(*call.args, **call.kwargs)]
        if self._put(module, held, answer, "experts", trials):
            self._experts_of[module] = experts

    def _router(self, module: nn.Module) -> None:
        held = Held()
        by = self._ops.mixtures
        router = Router.read(module, held, by) if by is not None and module in self._calls else None
        if router is None or not self._calls[module][-1].gives("hidden_states"):
            return
        ops = self._ops
        far, near = self._calls[module][0], self._calls[module][-1]
        router.learn(module(*near.args, **near.kwargs))

        def answer(step: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            return router(ops, _input(args, kwargs))

        fused = Fused(module, held, answer)
        trials = [Call((x,), {}) for x in router.trials(_input(near.args, near.kwargs))]
        if equal(module, fused, near, router.logits_of) and all(
            equal(module, fused, call, router.choice_of) for call in (near, far.scaled(LARGE), *trials)
        ):
            self._install(module, fused, held, "routers")
            self._routers[module] = router

    def _mixture(self, module: nn.Module) -> None:
        children = module._modules
        router, experts = self._routers.get(children.get("gate")), self._experts_of.get(children.get("experts"))
        if router is None or experts is None or len(children) > 2 or module._parameters or hooked(module):
            return
        mixture, ops = Mixture(router, experts), self._ops
        held = Held([entry for child in children.values() for entry in self._held[child].entries])  # type: ignore[index]

        def answer(step: Any, args: Any, kwargs: Any) -> Tensor:
            x = _input(args, kwargs)
            return mixture(ops, x.view(-1, x.shape[-1])).view(x.shape)

        if self._put(module, held, answer, "mixtures"):
            self._mlps[module] = mixture

    def _attention(self, module: nn.Module) -> None:
        held = Held()
        attention = Attention.read(module, held, self._norms.get) if module in self._calls else None
        if attention is None or not self._learn(module, attention):
            return
        ops = self._ops

        def answer(step: Any, args: Any, kwargs: Any) -> tuple[Tensor, None]:
            x = _input(args, kwargs)
            return attention(ops, step, x[0], _rotary(step, args, kwargs)).unsqueeze(0), None

        if self._put(module, held, answer, "attention"):
            self._attentions[module] = attention
            self._covered.update(module.children())

    def _learn(self, module: nn.Module, attention: Attention) -> bool:
        """Heads and options, from the calls of its own code; they must not depend on the position."""
        seen = []
        for call in self._calls[module]:
            step = ReferenceStep(packed=False)
            with running(step):
                module(*call.args, **call.kwargs)
            if step.heads is None:
                return False
            seen.append((step.heads, step.options))
        (heads, options), others = seen[0], seen[1:]
        if any(h != heads or not _same(o, options) for h, o in others):
            return False
        attention.learn(*heads, options)
        return True

    def _layer(self, module: nn.Module) -> None:
        children = {name: child for name, child in module._modules.items() if not isinstance(child, nn.Dropout)}
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        if set(children) != set(names) or module not in self._calls or hooked(module):
            return
        before, attention, between, mlp = (children[name] for name in names)
        if (
            before not in self._norms
            or attention not in self._attentions
            or between not in self._norms
            or mlp not in self._mlps
        ):
            return
        layer = Layer(self._norms[before], self._attentions[attention], self._norms[between], self._mlps[mlp])
        held = Held([entry for child in children.values() for entry in self._held[child].entries])  # type: ignore[index]
        ops, whole = self._ops, self._ops.compile_layer(layer)

        def answer(step: Any, args: Any, kwargs: Any) -> Tensor:
            x = _input(args, kwargs)
            x, rotary = x[0], _rotary(step, args, kwargs)
            out = None if whole is None else whole(step, x, rotary)
            return (layer(ops, step, x, rotary) if out is None else out).unsqueeze(0)

        self._put(module, held, answer, "layers")

    def _linear(self, module: nn.Module) -> None:
        if module in self._covered or module not in self._calls or not Linear.fits([module]):
            return
        held = Held()
        linear, ops = Linear([module], held), self._ops  # type: ignore[list-item]

        def answer(step: Any, args: Any, kwargs: Any) -> Tensor:
            x = _input(args, kwargs, "input")
            return linear(ops, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

        self._put(module, held, answer, "linears")

    def _tables(self, module: nn.Module) -> None:
        held = Held()
        rotary = Rotary.read(module, held) if module in self._calls else None
        if rotary is None:
            return
        ops = self._ops

        def answer(step: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
            return rotary(ops, *args, **kwargs)

        fused = Fused(module, held, answer)
        if all([same_tables(module, fused, call) for call in self._calls[module]]):  # all: the last are near positions
            self._install(module, fused, held, "rotary")

    def _put(
        self, module: nn.Module, held: Held, answer: Callable[..., Any], kind: str, trials: Sequence[Call] = ()
    ) -> bool:
        """trials: calls that must be answered like the module, beside those that its model made."""
        if module not in self._calls:
            return False
        fused = Fused(module, held, answer)
        far, near = self._calls[module][0], self._calls[module][-1]
        if not all(equal(module, fused, call) for call in (near, far.scaled(LARGE), *trials)):
            return False
        self._install(module, fused, held, kind)
        return True

    def _install(self, module: nn.Module, fused: Fused, held: Held, kind: str) -> None:
        vars(module)["forward"] = fused
        self._held[module] = held
        self.counts[kind] += 1


def _input(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "hidden_states") -> Tensor:
    """What a module is called on."""
    x: Tensor = args[0] if args else kwargs[name]
    return x


def _rotary(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """cos and sin `[T, R]` among the arguments of a layer or its attention; the same pair serves many layers."""
    given = kwargs.get("position_embeddings")
    if given is None:
        given = next((a for a in args[1:] if isinstance(a, tuple) and len(a) == 2), None)
    if given is None:
        return None
    known = getattr(step, "rotary", None)
    if known is None or known[0] is not given:
        known = step.rotary = given, (given[0][0].contiguous(), given[1][0].contiguous())
    pair: tuple[Tensor, Tensor] = known[1]
    return pair


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k] is b[k] or (not isinstance(a[k], Tensor) and a[k] == b[k]) for k in a)
