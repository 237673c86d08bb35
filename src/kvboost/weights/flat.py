"""A layer as one buffer: where each of its parameters lies, and how parameters become views of it.

Weights that are multiplied as one (q, k and v; gate and up) lie next to each other without a gap, so that joining them
needs no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 256
"""Where a run of parameters begins: what GPUs load best, and a multiple of a cache line."""

PAGE_BYTES = 4096
"""What the size of a layer is a multiple of: so it is read from a drive past the page cache."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules whose parameters of one name lie together."""


@dataclass(frozen=True)
class Piece:
    """One parameter in a flat buffer. name: as the model says it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter in `buffer`, uint8 `[nbytes or more]`."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of all parameters of one layer. Equal for equal names, shapes and dtypes, in every process."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @classmethod
    def of(cls, owned: Iterable[Owned]) -> FlatLayout:
        known = {o.name: o.parameter for o in owned}
        pieces, at = [], 0
        for run in _runs(list(known)):
            at = _up(at, ALIGNMENT_BYTES)
            for name in run:
                tensor = known[name]
                piece = Piece(name, tuple(tensor.shape), tensor.dtype, _up(at, tensor.dtype.itemsize))
                pieces.append(piece)
                at = piece.offset + piece.nbytes
        return cls(tuple(pieces), _up(at, PAGE_BYTES))


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Names in order, those of siblings together at the place of the first."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        path = name.split(".")
        key: tuple[str, ...] = (name,)
        for kin in SIBLINGS:
            if len(path) > 1 and path[-2] in kin:
                key = (*path[:-2], *kin, path[-1])
        runs.setdefault(key, []).append(name)
    return list(runs.values())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Owned:
    """One parameter and everywhere it stands: its names (two when it is tied), and the modules with its name there."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def become(self, view: Tensor) -> nn.Parameter:
        """Make the parameter the tensor `view`; returns it, a new one when it was a meta tensor."""
        self.parameter.requires_grad_(False)
        if self.parameter.device.type != "meta":
            self.parameter.data = view
            return self.parameter
        real = nn.Parameter(view, requires_grad=False)  # a meta tensor's data cannot be set
        for module, name in self.places:
            module._parameters[name] = real
        return real


def owned_by_layer(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[list[Owned]], list[Owned]]:
    """All parameters of `model`: those of each layer alone, and the rest, to which whatever is shared belongs."""
    layer_of = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((f"{prefix}.{name}".lstrip("."), module, name))
    by_layer: list[list[Owned]] = [[] for _ in layers]
    rest: list[Owned] = []
    for parameter, places in found.items():
        names = tuple(name for name, _, _ in places)
        owned = Owned(names, parameter, tuple((module, name) for _, module, name in places))
        owners = {layer_of.get(module) for _, module, _ in places}
        only = owners.pop() if len(owners) == 1 else None
        (rest if only is None else by_layer[only]).append(owned)
    return by_layer, rest
