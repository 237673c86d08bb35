"""Which decoding sequences begin with the same blocks, so that a GPU reads what they share once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

MAX_GROUPS = 32
"""Pieces that the decoding rows are cut in; half of them may share something."""

LEAST_SAVED_TOKENS = 8192
"""Keys that need not be read again, from which a step has two more launches a layer: with 4 KV heads of 128 an H200 reads them in
4 us, about what the launches take."""

Piece = tuple[int, int, int]
"""Rows from, to, and how many blocks they share."""


def shared_pieces(tables: Sequence[Int32s], before: Sequence[int], block_size: int) -> list[Piece]:
    """Pieces of the decoding rows, in order and without gaps, or none where sharing does not pay.

    tables: of the sequences, those that share next to one another. before: each one's blocks that are full before the
    token it decodes.
    """
    found: list[Piece] = []
    at = 0
    while at < len(tables):
        end, common = at + 1, before[at]
        while end < len(tables) and common and before[end] and tables[end][0] == tables[at][0]:
            common = _common(tables[at], tables[end], min(common, before[end]))
            end += 1
        if end - at > 1:
            found.append((at, end, common))
        at = end
    found = sorted(sorted(found, key=_saved, reverse=True)[: MAX_GROUPS // 2 - 1])
    if sum(map(_saved, found)) * block_size < LEAST_SAVED_TOKENS:
        return []
    pieces, done = [], 0
    for piece in found:
        if piece[0] > done:
            pieces.append((done, piece[0], 0))
        pieces.append(piece)
        done = piece[1]
    return pieces if done == len(tables) else [*pieces, (done, len(tables), 0)]


def _saved(piece: Piece) -> int:
    return (piece[1] - piece[0] - 1) * piece[2]


def _common(a: Int32s, b: Int32s, length: int) -> int:
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
