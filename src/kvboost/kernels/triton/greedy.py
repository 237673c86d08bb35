# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The largest logit of each row, as `torch.max` finds it: the first among equals, and a NaN above all numbers.

Two launches. The first reads the logits once and keeps the largest of each piece of a row; the second finds the first
piece that has the row's largest, and looks only there for the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before

WIDE, NARROW = 8192, 1024
"""Logits of one piece: four loads of 16 bytes for each thread, or one, in 16 bits."""

PROGRAMS = 264
"""Where wide pieces are fewer than two for each multiprocessor of the largest GPU, pieces are narrow."""

MAX_ROWS = 65535
"""A grid's second dimension."""


def best_tokens(logits: Tensor) -> Tensor:
    """int32 `[2, R]` of `logits [R, V]`: the token with the largest logit of each row, then the bits of that logit in float32.

    A row with a NaN answers its first NaN, one of -inf alone token 0. logits in float32, float16 or bfloat16, of any row
    stride. Raises ValueError where the logits of a row are not adjacent in memory, there are none, or rows beyond MAX_ROWS.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or vocab == 0 or rows > MAX_ROWS:
        raise ValueError(
            f"logits {tuple(logits.shape)} with strides {logits.stride()} must be up to {MAX_ROWS} rows of adjacent numbers."
        )
    block = WIDE if rows * triton.cdiv(vocab, WIDE) >= PROGRAMS else NARROW
    pieces = triton.cdiv(vocab, block)
    tops = logits.new_empty(rows, pieces, dtype=torch.float32)
    chosen = logits.new_empty(2, rows, dtype=torch.int32)
    if rows:
        options = {"VOCAB": vocab, "BLOCK": block, "num_warps": max(4, block // 1024)}
        _tops_kernel[(pieces, rows)](logits, tops, logits.stride(0), **options, **early(logits.device))
        _choose_kernel[(rows,)](
            logits, tops, chosen, rows, logits.stride(0),
            PIECES=pieces, BLOCK_PIECES=triton.next_power_of_2(pieces), **options, **early(logits.device),
        )  # fmt: skip
    return chosen


@triton.jit
def _piece(row, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a piece and their logits in float32; behind the row's end -inf."""
    column = begin + tl.arange(0, BLOCK)
    return column, tl.load(row + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def _tops_kernel(logits, tops, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid `(pieces, rows)`. The largest of each piece; inf where it has a NaN."""
    wait_for_kernel_before(EARLY)
    row = tl.program_id(1)
    _, x = _piece(logits + row.to(tl.int64) * stride, tl.program_id(0) * BLOCK, VOCAB, BLOCK)
    top = tl.max(tl.where(x == x, x, float("inf")), 0)
    tl.store(tops + row * tl.num_programs(0) + tl.program_id(0), top)


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    logits, tops, chosen, rows, stride,
    PIECES: tl.constexpr, BLOCK_PIECES: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(rows,)`."""
    wait_for_kernel_before(EARLY)
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    piece = tl.arange(0, BLOCK_PIECES)
    top = tl.load(tops + row * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, piece, PIECES), 0)
    if best < float("inf"):
        column, x = _piece(start, first * BLOCK, VOCAB, BLOCK)
        token = tl.min(tl.where(x == best, column, VOCAB), 0)
    else:  # a number overflowed somewhere: the request fails, and its error names the first NaN, or the first inf
        token = VOCAB
        infinite = VOCAB
        for begin in range(first * BLOCK, VOCAB, BLOCK):
            column, x = _piece(start, begin, VOCAB, BLOCK)
            token = tl.minimum(token, tl.min(tl.where(x == x, VOCAB, column), 0))
            infinite = tl.minimum(infinite, tl.min(tl.where(x == best, column, VOCAB), 0))
        best = tl.where(token < VOCAB, float("nan"), best)
        token = tl.where(token < VOCAB, token, infinite)
    tl.store(chosen + row, token)
    tl.store(chosen + rows + row, best.to(tl.int32, bitcast=True))
