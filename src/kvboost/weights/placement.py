"""Where each parameter of a model with streamed layers goes while the model is loaded, one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvboost.cache.pages import zeroed_buffer
from kvboost.errors import ModelLoadError
from kvboost.weights.flat import FlatLayout, Owned, Piece
from kvboost.weights.store import HostArena


@dataclass
class Home:
    """A run of parameters that lie together: one layer, or what is outside of layers.

    memory: makes the buffer when the first parameter comes; None for what is there already and need not be filled.
    filled: called with the buffer when its last parameter has been filled; the buffer is then let go.
    """

    layout: FlatLayout
    memory: Callable[[int], Tensor] | None
    filled: Callable[[Tensor], None] | None = None
    buffer: Tensor | None = None
    waiting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waiting = {piece.name for piece in self.layout.pieces}

    def view(self, piece: Piece) -> Tensor:
        """The place of one parameter, to be filled; a meta tensor when there is nothing to fill."""
        self.waiting.discard(piece.name)
        if self.memory is None:
            return torch.empty(piece.shape, dtype=piece.dtype, device="meta")
        if self.buffer is None:
            self.buffer = self.memory(self.layout.nbytes)
        return piece.view(self.buffer)


class Placement:
    """Hands out memory by the names of parameters, as `place` of the loaders, and passes finished layers on.

    A parameter has been filled when the next one is asked for, or at `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._homes: dict[str, tuple[Home, Piece]] = {}
        self._last: Home | None = None

    def add(self, owned: Sequence[Owned], home: Home) -> None:
        pieces = {piece.name: piece for piece in home.layout.pieces}
        for o in owned:
            for name in o.names:
                self._homes[name] = home, pieces[o.name]

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a parameter; a meta tensor when it need not be filled. What is no parameter gets its own."""
        self._pass_on()
        if name not in self._homes:
            return torch.empty(shape, dtype=dtype, device=self._device)
        home, piece = self._homes[name]
        if (piece.shape, piece.dtype) != (tuple(shape), dtype):
            raise ModelLoadError(
                f"{name} is {list(shape)} of {dtype}, and was {list(piece.shape)} of {piece.dtype} when its size was "
                "looked up. Was a file replaced meanwhile? Load the model again."
            )
        self._last = home
        return home.view(piece)

    def finish(self) -> None:
        """All parameters have been filled. Raises `ModelLoadError` when one of a streamed layer was never asked for."""
        self._pass_on()
        for name, (home, _) in self._homes.items():
            if home.filled is not None and home.waiting:
                raise ModelLoadError(
                    f"{name} was not loaded: its layer cannot be streamed. Set no budget for this model."
                )

    def _pass_on(self) -> None:
        home, self._last = self._last, None
        if home is not None and not home.waiting and home.filled is not None and home.buffer is not None:
            home.filled(home.buffer)
            home.buffer = home.memory = None


def on_device(device: torch.device) -> Callable[[int], Tensor]:
    """Buffers for weights that stay."""
    if device.type == "cpu":
        return zeroed_buffer
    return lambda size: torch.empty(size, dtype=torch.uint8, device=device)


def in_arena(arena: HostArena, index: int) -> Callable[[int], Tensor]:
    """The place of a layer in RAM."""
    return lambda size: arena.layer(index)[:size]


class Staging:
    """Buffers for layers on their way to a drive; each is used again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []

    def take(self, _: int) -> Tensor:
        """uint8, as long as the largest layer, at the beginning of a page."""
        return self._free.pop() if self._free else zeroed_buffer(self._size)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
