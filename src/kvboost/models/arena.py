"""Weights on a CPU, laid out so that matrix products read them at full speed.

Files and converters leave tensors at odd addresses (16 bytes past a cache line is common), and in 4 KiB pages. Here all
weights lie in one buffer, for which the kernel is asked for huge pages. Matrices of one module and one shape of row
follow each other without a gap, so that products which share their input (q, k and v; gate and up) are one matrix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.cache.pages import zeroed_buffer

ALIGNMENT_BYTES = 64
"""A cache line, and the width of an AVX-512 load."""


@dataclass(frozen=True)
class Piece:
    """A tensor to be placed. name: its parameter's, `...self_attn.q_proj.weight`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def block(self) -> str:
        """The module that holds the module: `...self_attn`."""
        return self.name.rpartition(".")[0].rpartition(".")[0]

    @property
    def neighbours(self) -> Hashable:
        """Equal for matrices that follow each other without a gap."""
        return (self.block, self.dtype, self.shape[1:]) if len(self.shape) == 2 else self.name


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Block by block, as a model runs; in each the matrices before the vectors."""
    blocks = {block: i for i, block in enumerate(dict.fromkeys(piece.block for piece in pieces))}
    return sorted(pieces, key=lambda piece: (blocks[piece.block], len(piece.shape) != 2))


class Arena:
    """One buffer with a place for each of `pieces`, which are `in_order`; memory is taken as it is written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        at, before = 0, None
        self._places: dict[str, tuple[int, Piece]] = {}
        for piece in pieces:
            if before is None or before.neighbours != piece.neighbours:
                at = -(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._places[piece.name] = (at, piece)
            at, before = at + piece.nbytes, piece
        self._buffer = zeroed_buffer(at)

    def place(self, name: str) -> Tensor:
        offset, piece = self._places[name]
        return self._buffer[offset : offset + piece.nbytes].view(piece.dtype).view(piece.shape)


@torch.no_grad()
def settle(model: PreTrainedModel) -> None:
    """Move the parameters of a CPU model into an arena, one copy at a time; tied weights stay tied. Those that are in
    one already, a GGUF file's, stay.

    The peak is the model once, plus its largest weight, as each old storage is let go when its copy is made.
    """
    parameters = dict(model.named_parameters())
    if any(p.device.type != "cpu" or not p.is_contiguous() for p in parameters.values()):
        return
    if len({p.untyped_storage().data_ptr() for p in parameters.values()}) <= 1:
        return
    pieces = in_order([Piece(name, tuple(p.shape), p.dtype) for name, p in parameters.items()])
    arena = Arena(pieces)
    for piece in pieces:
        parameter = parameters[piece.name]
        parameter.data = arena.place(piece.name).copy_(parameter.data)
