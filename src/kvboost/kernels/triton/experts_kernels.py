# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernels behind `experts`: pairs one by one, or sorted and in tiles.

A pair is a token and one of its experts; pair p is choice `p % TOP` of token `p // TOP`. Weight rows of the last block
beyond the weight's end are its last row again, not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvboost.kernels.triton.early import wait_for_kernel_before
from kvboost.kernels.triton.elementwise import activated


@triton.jit
def gated(gate, up, like: tl.constexpr, ACTIVATION: tl.constexpr):
    """`act(gate) * up` of sums in float32, rounded where a module rounds: both sums, the activation, the product."""
    gate, up = gate.to(like).to(tl.float32), up.to(like).to(tl.float32)
    return (activated(gate, ACTIVATION).to(like).to(tl.float32) * up).to(like)


@triton.jit
def weighted(part, weight):
    """`part * weight` in float32, rounded if both have one dtype: a product of two dtypes is not rounded by torch."""
    product = part.to(tl.float32) * weight.to(tl.float32)
    if part.dtype == weight.dtype:
        product = product.to(part.dtype).to(tl.float32)
    return product


@triton.jit
def added_up(share, residual, at, mask, like: tl.constexpr):
    """The sum of `share [choices, features]`, rounded; with a residual that plus the sum, rounded again."""
    total = tl.sum(share, 0).to(like)
    if residual is not None:
        total = (tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) + total.to(tl.float32)).to(like)
    return total


@triton.jit
def pair_inner_kernel(
    x, index, gate_up, inner, n, k, x_stride,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(pairs, blocks of inner features)`: `inner [pairs, n]`. Pairs that share an expert run side by side."""
    wait_for_kernel_before(EARLY)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(index + pair).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    gate_at = gate_up + expert * (2 * n * k) + tl.minimum(feature, n - 1)[:, None] * k + lane[None, :]
    x_at = x + pair // TOP * x_stride + lane
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        if EVEN:
            gate_w, up_w, values = tl.load(gate_at + start), tl.load(gate_at + n * k + start), tl.load(x_at + start)
        else:
            inside = start + lane < k
            gate_w = tl.load(gate_at + start, mask=inside[None, :], other=0.0)
            up_w = tl.load(gate_at + n * k + start, mask=inside[None, :], other=0.0)
            values = tl.load(x_at + start, mask=inside, other=0.0)
        values = values.to(tl.float32)[None, :]
        gate += gate_w.to(tl.float32) * values
        up += up_w.to(tl.float32) * values
    result = gated(tl.sum(gate, 1), tl.sum(up, 1), inner.dtype.element_ty, ACTIVATION)
    tl.store(inner + pair * n + feature, result, mask=feature < n)


@triton.jit
def pair_outer_kernel(
    inner, index, weights, down, residual, out, n, k,
    TOP: tl.constexpr, BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens, blocks of features)`: `out [tokens, n]`, all experts of a token in one program."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_TOP)
    real = choice < TOP
    expert = tl.load(index + token * TOP + choice, mask=real, other=0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    rows = expert[:, None] * n + tl.minimum(feature, n - 1)[None, :]
    down_at = down + rows[:, :, None] * k + lane[None, None, :]
    inner_at = inner + (token * TOP + choice)[:, None, None] * k + lane[None, None, :]
    total = tl.zeros([BLOCK_TOP, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w, values = tl.load(down_at + start), tl.load(inner_at + start)
        else:
            inside = real[:, None, None] & (start + lane < k)[None, None, :]
            w = tl.load(down_at + start, mask=inside, other=0.0)
            values = tl.load(inner_at + start, mask=inside, other=0.0)
        total += w.to(tl.float32) * values.to(tl.float32)
    part = tl.sum(total, 2).to(out.dtype.element_ty)
    share = weighted(part, tl.load(weights + token * TOP + choice, mask=real, other=0.0)[:, None])
    at, mask = token * n + feature, feature < n
    tl.store(out + at, added_up(share, residual, at, mask, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(index, order, tiles, pairs, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid `(experts,)`: each expert finds its pairs and writes them, and its tiles, to places nobody else writes.

    order: `[pairs]` pair numbers by expert, for one expert in their order. tiles: `[slots, 3]` expert, first place, place
    behind the last; equal places: nothing to do. With `before` pairs of lower experts, the tiles of expert e begin at slot
    `before // TILE_ROWS + min(e, before)`, which leaves enough for all below and needs no count of other experts' tiles.
    """
    wait_for_kernel_before(EARLY)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        inside = start + lane < pairs
        chosen = tl.load(index + start + lane, mask=inside, other=0).to(tl.int32)
        lower += (inside & (chosen < expert)).to(tl.int32)
        mine += (inside & (chosen == expert)).to(tl.int32)
    before, count = tl.sum(lower, 0), tl.sum(mine, 0)
    if count > 0:
        place = before
        for start in range(0, pairs, BLOCK):
            inside = start + lane < pairs
            chosen = tl.load(index + start + lane, mask=inside, other=0).to(tl.int32)
            own = (inside & (chosen == expert)).to(tl.int32)
            tl.store(order + place + tl.cumsum(own, 0) - 1, start + lane, mask=own > 0)
            place += tl.sum(own, 0)
    behind = before + count
    slot = before // TILE_ROWS + tl.minimum(expert, before)
    end = behind // TILE_ROWS + tl.minimum(expert + 1, behind)
    few = tl.arange(0, 32)
    for first in range(slot, end, 32):
        at = tiles + (first + few) * 3
        mask = first + few < end
        begin = tl.minimum(before + (first + few - slot) * TILE_ROWS, behind)
        tl.store(at, tl.zeros([32], tl.int32) + expert, mask=mask)
        tl.store(at + 1, begin, mask=mask)
        tl.store(at + 2, tl.minimum(begin + TILE_ROWS, behind), mask=mask)


@triton.jit
def tile_kernel(
    x, weight, tiles, order, out, n, k, x_stride,
    TOP: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(blocks of features, slots)`. The weight is the tall operand of the product, the pairs the narrow one.

    GATED: x holds tokens, weight gate and up; `out [pairs, n]` in sorted order. Otherwise x holds pairs in sorted order,
    and `out [pairs, n]` gets them in their own.
    """
    wait_for_kernel_before(EARLY)
    slot = tiles + tl.program_id(1) * 3
    first, last = tl.load(slot + 1), tl.load(slot + 2)
    if first < last:
        expert = tl.load(slot).to(tl.int64)
        place = first + tl.arange(0, TILE_ROWS)
        real = place < last
        pair = tl.load(order + place, mask=real, other=0)
        source = pair // TOP if GATED else place
        feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        weight_at = weight + expert * (n * k * (2 if GATED else 1))
        weight_at += tl.minimum(feature, n - 1)[:, None] * k + lane[None, :]
        x_at = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
        acc = tl.zeros([BLOCK_N, TILE_ROWS], tl.float32)
        up = tl.zeros([BLOCK_N, TILE_ROWS], tl.float32)
        for start in range(0, k, BLOCK_K):
            if EVEN:
                w = tl.load(weight_at)
                narrow = tl.load(x_at, mask=real[None, :], other=0.0)
            else:
                inside = start + lane < k
                w = tl.load(weight_at, mask=inside[None, :], other=0.0)
                narrow = tl.load(x_at, mask=real[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w, narrow, acc, input_precision=PRECISION)
            if GATED:
                w = tl.load(weight_at + n * k) if EVEN else tl.load(weight_at + n * k, mask=inside[None, :], other=0.0)
                up = tl.dot(w, narrow, up, input_precision=PRECISION)
            weight_at += BLOCK_K
            x_at += BLOCK_K
        mask = (feature < n)[:, None] & real[None, :]
        like: tl.constexpr = out.dtype.element_ty
        if GATED:
            target = out + place.to(tl.int64)[None, :] * n + feature[:, None]
            tl.store(target, gated(acc, up, like, ACTIVATION), mask=mask)
        else:
            target = out + pair.to(tl.int64)[None, :] * n + feature[:, None]
            tl.store(target, acc.to(like), mask=mask)


@triton.jit
def combine_kernel(
    parts, weights, residual, out, n, TOP: tl.constexpr, BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid `(tokens, blocks of features)`: the sum of a token's pairs times their weights, rounded once."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    pair = token * TOP + tl.arange(0, BLOCK_TOP)
    real = tl.arange(0, BLOCK_TOP) < TOP
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.load(parts + pair[:, None] * n + feature[None, :], mask=real[:, None] & (feature < n)[None, :], other=0.0)
    share = weighted(part, tl.load(weights + pair, mask=real, other=0.0)[:, None])
    at, mask = token * n + feature, feature < n
    tl.store(out + at, added_up(share, residual, at, mask, out.dtype.element_ty), mask=mask)
