"""What stands in a module's place, and the numbers that prove it: calls as the model made them, answered by both."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.attention.step import current_step, running
from kvboost.models.fused.parts import Held
from kvboost.models.fused.reference import ReferenceStep

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Greatest ‖fused - own‖ / ‖own‖. A form that computes something else is off by far more."""

TABLES_APART = 0.0
"""Greatest difference of rotary tables: they are the same bits. (NumPy's cosine, which Triton's interpreter uses, is another.)"""

LARGE = 64.0
"""Inputs are tried scaled by this too: a module that clips or caps shows it there."""


class Fused:
    """Stands as `forward` on one module instance. An answer of None leaves a call to the module's own code."""

    def __init__(
        self, module: nn.Module, held: Held, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._module = weakref.ref(module)
        self._held = held
        self._answer = answer
        self._own = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.ours(*args, **kwargs)
        return self._own(self._module(), *args, **kwargs) if out is None else out

    def ours(self, *args: Any, **kwargs: Any) -> Any:
        """The fused answer; None where the module's own code is to run."""
        step = current_step()
        if step is None or not hasattr(step, "attend_packed") or not self._held.intact():
            return None
        return self._answer(step, args, kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module, deep or pickled, gets its class's own forward."""
        return own_forward, (self._module(),)


def own_forward(module: nn.Module) -> types.MethodType:
    """What `module.forward` is when nobody has put anything in its place."""
    return types.MethodType(type(module).forward, module)


class Call:
    """One call of a module, as its model made it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def gives(self, *names: str) -> bool:
        """Whether it gives exactly the arguments of these names, the first of them by position, or all by name."""
        return set(names[len(self.args) :]) == set(self.kwargs) and len(self.args) <= len(names)

    def scaled(self, factor: float) -> Call:
        if self.args:
            return Call((self.args[0] * factor, *self.args[1:]), self.kwargs)
        name = "hidden_states" if "hidden_states" in self.kwargs else "x"
        return Call((), {**self.kwargs, name: self.kwargs[name] * factor})


def observe(model: PreTrainedModel, positions_below: int) -> dict[nn.Module, list[Call]]:
    """Run the model at far and at near positions (near last: some rotary embeddings keep what they saw)."""
    calls: dict[nn.Module, list[Call]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, []).append(Call(args, kwargs))

    count = 10
    far = torch.linspace(0, max(count, positions_below) - 1, count).long()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(3, 3 + 7 * count, 7, device=model.device)[None] % vocabulary
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        for positions in (far, torch.arange(count)):
            with running(ReferenceStep(packed=False)):
                model(input_ids=ids, position_ids=positions.to(model.device)[None], use_cache=False)
    return calls


def only_tensor(answer: Any) -> Tensor | None:
    """The tensor of an answer, alone or before Nones."""
    if isinstance(answer, tuple):
        answer = None if any(x is not None for x in answer[1:]) else answer[0]
    return answer if isinstance(answer, Tensor) else None


def equal(module: nn.Module, fused: Fused, call: Call, as_tensor: Callable[[Any], Tensor | None] = only_tensor) -> bool:
    """Whether both answer a call alike, within `TOLERANCE`. as_tensor: of an answer, what is compared; None: it is none of
    those that can be."""
    try:
        with _plain(module), running(ReferenceStep(packed=False)):
            own = type(module).forward(module, *call.args, **call.kwargs)
        with running(ReferenceStep(packed=True)):
            ours = fused.ours(*call.args, **call.kwargs)
    except Exception:  # a shape or an argument the form does not know: it is not this module
        return False
    if isinstance(own, tuple) and (not isinstance(ours, tuple) or len(own) != len(ours)):
        return False
    own, ours = as_tensor(own), as_tensor(ours)
    if own is None or ours is None or own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    difference = (own.float() - ours.float()).norm() / own.float().norm().clamp_min(1e-12)
    return bool(difference < TOLERANCE[own.dtype])


def same_tables(module: nn.Module, fused: Fused, call: Call) -> bool:
    """Ours come first: the module's own code may change its frequencies for far positions, and they must not need it."""
    try:
        with running(ReferenceStep(packed=True)):
            ours = fused.ours(*call.args, **call.kwargs)
    except Exception:  # an argument the form does not know
        ours = None
    own = type(module).forward(module, *call.args, **call.kwargs)
    if ours is None or not isinstance(own, tuple) or len(own) != len(ours):
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and float((a.float() - b.float()).abs().max()) <= TABLES_APART
        for a, b in zip(own, ours, strict=True)
    )


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """The module and all below it as their classes made them."""
    taken = [(m, vars(m).pop("forward")) for m in module.modules() if isinstance(vars(m).get("forward"), Fused)]
    try:
        yield
    finally:
        for m, forward in taken:
            vars(m)["forward"] = forward
