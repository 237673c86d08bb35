"""What stands around streamed layers in a Transformers model, so that whoever runs them finds their weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvboost.errors import KVBoostError


class Around(Protocol):
    """The streamer, as its hooks see it. place: number of a layer among the streamed ones."""

    def enter(self, place: int) -> None: ...

    def leave(self, place: int) -> None: ...

    def ended(self) -> None: ...

    def present(self, module: nn.Module) -> AbstractContextManager[None]: ...


class Hook:
    """Neither looks at activations nor changes them."""

    transparent = True

    def __init__(self, streamer: Around, place: int) -> None:
        self._streamer, self._place = streamer, place

    def __reduce__(self) -> Any:
        raise KVBoostError(
            "a streamed model cannot be copied or pickled: most of it is not in memory. Use its state_dict()."
        )


class Before(Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            x = args[0] if args else kwargs.get("hidden_states")
            if isinstance(x, Tensor) and x.requires_grad:
                raise KVBoostError("a streamed model cannot be trained: a layer's weights are gone when it is "
                                   "differentiated. Run it under torch.no_grad(), or load it without a budget.")  # fmt: skip
        self._streamer.enter(self._place)


class After(Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._streamer.leave(self._place)


class Ended(Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._streamer.ended()


class Saving(Hook):
    """state_dict() holds copies: the views of a slot would all show the layer that is there last."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        with self._streamer.present(module):
            for name, parameter in module.named_parameters():
                if prefix + name in state:
                    state[prefix + name] = parameter.detach().clone()


class Loading(Hook):
    def __call__(self, *_: Any) -> None:
        raise KVBoostError(
            "weights cannot be loaded into a streamed model: they would be overwritten by the next sweep."
        )
