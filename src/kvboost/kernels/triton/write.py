# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The slot writer: keys and values of the packed tokens into the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_slots(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store `key [T, Hkv, D]` and `value [T, Hkv, Dv]` in the pool's `keys [blocks, block_size, Hkv, D]` and `values`.

    slots `[T]` int64: `block * block_size + offset`, -1 for a token that is not stored. Raises ValueError for shapes
    that do not fit.
    """
    check_slots(key, value, keys, values, slots)
    row_k, row_v = key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]
    _write_kernel[(slots.shape[0],)](
        key, value, keys, values, slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        DIM=key.shape[2], DIM_V=value.shape[2], ROW_K=row_k, ROW_V=row_v,
        BLOCK_K=triton.next_power_of_2(row_k), BLOCK_V=triton.next_power_of_2(row_v), PAGE=keys.shape[1], num_warps=4,
    )  # fmt: skip


def check_slots(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Raise ValueError unless `key` and `value` can be stored in `keys` and `values` at `slots`."""
    if key.shape[1:] != keys.shape[2:] or value.shape[1:] != values.shape[2:]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit the pool's {tuple(keys.shape)} and "
            f"{tuple(values.shape)}: heads and dimensions must be equal."
        )
    if not key.dtype == value.dtype == keys.dtype == values.dtype:
        raise ValueError(f"key {key.dtype}, value {value.dtype} and pool {keys.dtype} must have one dtype.")
    if key.shape[0] != slots.shape[0] or value.shape[0] != slots.shape[0]:
        raise ValueError(f"{slots.shape[0]} slots for {key.shape[0]} keys and {value.shape[0]} values.")
    if any(x.stride(-1) != 1 for x in (key, value, keys, values)):
        raise ValueError("the elements of a head must be adjacent in memory in key, value and the pool.")


@triton.jit
def _write_kernel(
    key, value, keys, values, slots,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    keys_block_stride, keys_token_stride, keys_head_stride, values_block_stride, values_token_stride, values_head_stride,
    DIM: tl.constexpr, DIM_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens,)`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // PAGE
    offset = slot % PAGE
    element = tl.arange(0, BLOCK_K)
    head, column, mask = element // DIM, element % DIM, element < ROW_K
    k = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=mask)
    tl.store(keys + block * keys_block_stride + offset * keys_token_stride + head * keys_head_stride + column, k, mask)
    element = tl.arange(0, BLOCK_V)
    head, column, mask = element // DIM_V, element % DIM_V, element < ROW_V
    v = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=mask)
    target = values + block * values_block_stride + offset * values_token_stride
    tl.store(target + head * values_head_stride + column, v, mask)
