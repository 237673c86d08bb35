# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Rotary positions of queries and keys, and the write of keys and values into the pool, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before
from kvboost.kernels.triton.write import check_slots

HEADS_PER_PROGRAM = 8
"""8 heads of 128 in 16 bits are 2 KiB: sixteen bytes for each thread of a program of four warps."""


def rotary_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Rotate `query [T, Hq, D]` and `key [T, Hkv, D]` in place; store key and `value [T, Hkv, Dv]` as `write_slots` does.

    cos and sin `[T, R]`, R even and at most D: dimension d < R/2 turns with d + R/2, those from R on stay as they are.
    Products and the sum are rounded to the dtype one by one, as `x * cos + rotate_half(x) * sin` does in PyTorch: the
    results are the same bits. Raises ValueError for shapes or dtypes that do not fit.
    """
    check_slots(key, value, keys, values, slots)
    tokens, q_heads, dim = query.shape
    rotated = cos.shape[1]
    if key.shape[2] != dim or tokens != key.shape[0]:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in tokens and head dimension."
        )
    if cos.shape != (tokens, rotated) or sin.shape != cos.shape or rotated % 2 or rotated > dim:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [{tokens}, even number up to {dim}]."
        )
    if not query.dtype == key.dtype == cos.dtype == sin.dtype:
        raise ValueError(
            f"query {query.dtype}, key {key.dtype}, cos {cos.dtype} and sin {sin.dtype} must have one dtype."
        )
    if query.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("the elements of a head must be adjacent in memory in query, cos and sin.")
    kv_heads, dim_v = value.shape[1], value.shape[2]
    heads = HEADS_PER_PROGRAM
    parts = triton.cdiv(q_heads, heads) + 2 * triton.cdiv(kv_heads, heads)
    _rotary_write_kernel[(tokens, parts)](
        query, key, value, cos, sin, keys, values, slots,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        cos.stride(0), sin.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, DIM_V=dim_v, HALF=rotated // 2, HEADS=heads, PAGE=keys.shape[1],
        BLOCK_HALF=triton.next_power_of_2(rotated // 2), BLOCK_REST=triton.next_power_of_2(max(dim - rotated, 1)),
        BLOCK_V=triton.next_power_of_2(dim_v),
        num_warps=4, enable_fp_fusion=False, **early(query.device),
    )  # fmt: skip


@triton.jit
def _turn(a, b, cos, sin):
    """`a * cos + b * sin`, each operation rounded to the dtype of `a`."""
    left = (a.to(tl.float32) * cos.to(tl.float32)).to(a.dtype)
    right = (b.to(tl.float32) * sin.to(tl.float32)).to(a.dtype)
    return (left.to(tl.float32) + right.to(tl.float32)).to(a.dtype)


@triton.jit
def _rotate(rows, copy, valid, kept, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rotate rows `[N]` of pointers in place, and where `kept` also store them at `copy`."""
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    cos_low = tl.load(cos + column, mask=inside, other=0.0)[None, :]
    cos_high = tl.load(cos + HALF + column, mask=inside, other=0.0)[None, :]
    sin_low = tl.load(sin + column, mask=inside, other=0.0)[None, :]
    sin_high = tl.load(sin + HALF + column, mask=inside, other=0.0)[None, :]
    mask = valid[:, None] & inside[None, :]
    low_at = rows[:, None] + column[None, :]
    low = tl.load(low_at, mask=mask, other=0.0)
    high = tl.load(low_at + HALF, mask=mask, other=0.0)
    new_low = _turn(low, -high, cos_low, sin_low)
    new_high = _turn(high, low, cos_high, sin_high)
    tl.store(low_at, new_low, mask=mask)
    tl.store(low_at + HALF, new_high, mask=mask)
    copy_at = copy[:, None] + column[None, :]
    tl.store(copy_at, new_low, mask=mask & kept)
    tl.store(copy_at + HALF, new_high, mask=mask & kept)


@triton.jit
def _copy(rows, copy, mask_rows, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the columns from FIRST to DIM of rows."""
    column = FIRST + tl.arange(0, BLOCK)
    mask = mask_rows[:, None] & (column < DIM)[None, :]
    tl.store(copy[:, None] + column[None, :], tl.load(rows[:, None] + column[None, :], mask=mask), mask=mask)


@triton.jit
def _rotary_write_kernel(
    query, key, value, cos, sin, keys, values, slots,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    cos_stride, sin_stride,
    keys_block_stride, keys_token_stride, keys_head_stride, values_block_stride, values_token_stride, values_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens, groups of query heads + groups of key heads + groups of value heads)`."""
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token)  # on the device before the step
    wait_for_kernel_before(EARLY)
    kept = slot >= 0
    block = tl.maximum(slot, 0) // PAGE
    offset = tl.maximum(slot, 0) % PAGE
    cos += token * cos_stride
    sin += token * sin_stride
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        rows = query + token * query_token_stride + head * query_head_stride
        _rotate(rows, rows, head < Q_HEADS, False, cos, sin, HALF, BLOCK_HALF)
    elif part < Q_PARTS + KV_PARTS:
        head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
        rows = key + token * key_token_stride + head * key_head_stride
        copy = keys + block * keys_block_stride + offset * keys_token_stride + head * keys_head_stride
        _rotate(rows, copy, head < KV_HEADS, kept, cos, sin, HALF, BLOCK_HALF)
        if DIM > 2 * HALF:
            _copy(rows, copy, (head < KV_HEADS) & kept, 2 * HALF, DIM, BLOCK_REST)
    else:
        head = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)
        rows = value + token * value_token_stride + head * value_head_stride
        copy = values + block * values_block_stride + offset * values_token_stride + head * values_head_stride
        _copy(rows, copy, (head < KV_HEADS) & kept, 0, DIM_V, BLOCK_V)
