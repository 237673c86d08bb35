"""Paged attention on a GPU, through the Triton kernels. `attention/paged_torch.py` is what it is tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvboost.attention.math import attend
from kvboost.attention.step_tensors import StepInputs
from kvboost.cache.pool import KVPool
from kvboost.kernels.cuda import prompt_attention
from kvboost.kernels.triton.attention import paged_attention
from kvboost.kernels.triton.rotary import rotary_write
from kvboost.kernels.triton.write import write_slots

FRESH_TOKENS = 256
"""From this length on a prompt without cached keys goes through torch's fused attention over its own keys."""

FUSED_HEAD_DIM = 128

GATHER_TOKENS = 1024
"""From this length on a piece of a prompt over cached keys has them gathered for torch's fused attention where
`prompt_attention.cu` does not serve: 1.6 times the speed of Triton on an H200; copying a layer's keys is small beside it."""


class TritonStep:
    """The attention of one step over `pool`, for any number of sequences in a fixed number of launches per layer.

    A step that is captured in a CUDA graph is made from the inputs of the shape captured, and never used again.
    `num_attended` counts the layers served: fewer than the model has means that its attention went elsewhere.
    """

    def __init__(self, pool: KVPool, inputs: StepInputs, layer_ids: dict[int, int]) -> None:
        self._pool = pool
        self._inputs = inputs
        self._layers = layer_ids
        self.num_attended = 0

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Write the new keys and values, then attend. Shapes as in `StepAttention.attend`."""
        layer = self._layers[module.layer_idx]  # type: ignore[index]
        q, k, v = _rows(query), _rows(key), _rows(value)
        write_slots(k, v, self._pool.keys[layer], self._pool.values[layer], self._inputs.slots)
        return self._attend(layer, q, k, v, **options).unsqueeze(0)

    def attend_packed(
        self, layer_idx: int, qkv: Tensor, q_heads: int, rotary: tuple[Tensor, Tensor] | None, **options: Any
    ) -> Tensor:
        """As `attend`, from the rows of one fused product; rotation and write are one launch.

        qkv `[T, q_heads * D + kv_heads * (D + Dv)]`, not rotated; changed in place. rotary: cos and sin `[T, R]` of the
        half-rotation layout over the first R dims. Returns `[T, q_heads, Dv]`.
        """
        layer = self._layers[layer_idx]
        keys, values, slots = self._pool.keys[layer], self._pool.values[layer], self._inputs.slots
        shape = self._pool.layout.layers[layer]
        widths = [q_heads * shape.k_dim, shape.k_row, shape.v_row]
        q, k, v = (
            part.unflatten(1, (-1, dim))
            for part, dim in zip(qkv.split(widths, dim=1), (shape.k_dim, shape.k_dim, shape.v_dim), strict=True)
        )
        if rotary is None:
            write_slots(k, v, keys, values, slots)
        else:
            rotary_write(q, k, v, *rotary, keys, values, slots)
        return self._attend(layer, q, k, v, **options)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """`[T, Hq, Dv]` from query, key and value `[T, H, D]`, the last two stored already."""
        self.num_attended += 1
        length, keys = query.shape[0], self._inputs.alone
        # In fp32, and for heads wider than 128, torch has no fused attention for grouped queries here: it would make the
        # whole matrix of scores (8 GiB for 8,192 tokens of Gemma 3 12B).
        fused = query.dtype != torch.float32 or query.device.type == "cpu"
        fused = fused and max(query.shape[2], value.shape[2]) <= FUSED_HEAD_DIM
        plain = fused and softcap is None and s_aux is None and (sliding_window is None or keys <= sliding_window)
        if plain and keys == length >= FRESH_TOKENS:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            return attend(q, k, v, mask=None, causal=True, scaling=scaling)[0].transpose(0, 1)
        pool = self._pool.keys[layer], self._pool.values[layer]
        if plain and keys > length >= GATHER_TOKENS and not prompt_attention.serves(
            query, *pool, self._inputs.batch.positions
        ):  # fmt: skip
            return self._attend_gathered(layer, query, keys, scaling)
        return paged_attention(
            query, *pool, self._inputs.batch,
            scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
        )  # fmt: skip

    def _attend_gathered(self, layer: int, query: Tensor, num_keys: int, scaling: float | None) -> Tensor:
        """One sequence whose last tokens are `query`: the last row sees all keys, the one before all but one ..."""
        size = self._pool.layout.block_size
        blocks = self._inputs.batch.tables[: -(-num_keys // size)]
        groups = query.shape[1] // self._pool.keys[layer].shape[2]
        k, v = (
            pool[layer].index_select(0, blocks).flatten(0, 1)[:num_keys].repeat_interleave(groups, dim=1)
            for pool in (self._pool.keys, self._pool.values)
        )
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, k, v))
        mask = causal_lower_right(query.shape[0], num_keys)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        return out[0].transpose(0, 1)


def _rows(heads_first: Tensor) -> Tensor:
    """`[1, H, T, D]` as `[T, H, D]`; a copy only when the elements of a head are not adjacent."""
    rows = heads_first[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()
