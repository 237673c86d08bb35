"""Paged attention on a CPU by the compiled kernels: reads K and V where they lie, whatever mix of sequences a step has."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvboost.attention.paged_torch import Span
from kvboost.cache.layout import LayerShape
from kvboost.cache.pool import KVPool
from kvboost.kernels.native.library import DTYPES, Step, load


class NativeStep:
    """The attention of one step over `pool`, for any order of spans. `num_attended` counts the layers served."""

    def __init__(self, pool: KVPool, spans: Sequence[Span], layer_ids: dict[int, int]) -> None:
        self._lib = load()
        self._pool = pool
        self._layers = layer_ids
        self._is_bf16 = pool.slabs.dtype == torch.bfloat16
        self._threads = torch.get_num_threads()
        self.num_attended = 0
        size = pool.layout.block_size
        table_starts = np.cumsum([0, *(len(s.table) for s in spans)])
        begins = np.cumsum([0, *(s.count for s in spans)])
        self._tables = np.fromiter((b for s in spans for b in s.table), dtype=np.int32, count=int(table_starts[-1]))
        self._spans = np.array(
            [(b, s.count, s.start, t) for b, s, t in zip(begins, spans, table_starts, strict=False)], dtype=np.int32
        )
        position = np.concatenate([np.arange(s.start, s.kv_len) for s in spans])
        first = np.repeat(table_starts[:-1], [s.count for s in spans])
        self._slot_block = self._tables[first + position // size]
        self._slot_offset = (position % size).astype(np.int32)
        self._base = pool.slabs.data_ptr()
        self._struct = Step(
            rows=len(position), block_stride=pool.layout.slab_elements, block_size=size, num_spans=len(spans),
            spans=self._spans.ctypes.data, tables=self._tables.ctypes.data, slot_block=self._slot_block.ctypes.data,
            slot_offset=self._slot_offset.ctypes.data,
        )  # fmt: skip
        self._rotated_by: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Any,
    ) -> Tensor:
        """Write the new keys and values, then attend. Shapes as in `StepAttention.attend`."""
        layer = self._layers[module.layer_idx]  # type: ignore[index]
        shape = self._pool.layout.layers[layer]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        k = k if k.stride(2) == 1 else k.contiguous()
        v = v if v.stride(2) == 1 else v.contiguous()
        keys, values = self._places(layer, shape)
        block, offset = self._struct.slot_block, self._struct.slot_offset
        self._lib.kvb_write(
            self._is_bf16, k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), q.shape[0],
            shape.k_heads, shape.v_heads, shape.k_dim, shape.v_dim, block, offset, keys, values,
            self._pool.layout.slab_elements,
        )  # fmt: skip
        return self._attend(layer, shape, q, q.shape[1], **options).unsqueeze(0)

    def attend_packed(
        self, layer_idx: int, qkv: Tensor, q_heads: int, rotary: tuple[Tensor, Tensor] | None, **options: Any
    ) -> Tensor:
        """As `attend`, from the rows of one fused product.

        qkv `[T, q_heads * D + kv_heads * (D + Dv)]`, not rotated; changed in place. rotary: cos and sin `[T, R]`,
        contiguous, of the half-rotation layout over the first R dims. Returns `[T, q_heads, Dv]`.
        """
        layer = self._layers[layer_idx]
        shape = self._pool.layout.layers[layer]
        keys, values = self._places(layer, shape)
        cos, sin = rotary or (None, None)
        block, offset = self._struct.slot_block, self._struct.slot_offset
        self._lib.kvb_rotate_and_write(
            self._is_bf16, qkv.data_ptr(), qkv.stride(0), qkv.shape[0], q_heads, shape.k_heads, shape.k_dim,
            shape.v_dim, 0 if cos is None else cos.shape[1], None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(), block, offset, keys, values, self._pool.layout.slab_elements,
            self._threads,
        )  # fmt: skip
        return self._attend(layer, shape, qkv, q_heads, **options)

    def arguments(self, layer_idx: int, rotary: tuple[Tensor, Tensor] | None) -> int:
        """Address of the `Step` for one layer that C++ computes whole; it counts as served."""
        layer = self._layers[layer_idx]
        self.num_attended += 1
        struct = self._struct
        struct.keys, struct.values = self._places(layer, self._pool.layout.layers[layer])
        if rotary is not self._rotated_by and rotary is not None:
            cos, sin = self._rotated_by = rotary
            struct.rotary, struct.cos, struct.sin = cos.shape[1], cos.data_ptr(), sin.data_ptr()
        elif rotary is None:
            struct.rotary = 0
        return ctypes.addressof(struct)

    def _attend(
        self,
        layer: int,
        shape: LayerShape,
        query: Tensor,
        q_heads: int,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        self.num_attended += 1
        out = query.new_empty(query.shape[0], q_heads, shape.v_dim)
        keys, values = self._places(layer, shape)
        spans, num_spans, tables = self._struct.spans, self._struct.num_spans, self._struct.tables
        sinks = None if s_aux is None else s_aux.float().contiguous()
        self._lib.kvb_attention(
            self._is_bf16, query.data_ptr(), query.stride(0), keys, values, self._pool.layout.slab_elements,
            out.data_ptr(), q_heads * shape.v_dim, q_heads, shape.k_heads, shape.k_dim, shape.v_dim,
            self._pool.layout.block_size, spans, num_spans, tables,
            shape.k_dim**-0.5 if scaling is None else scaling, softcap or 0.0, sliding_window or 0,
            None if sinks is None else sinks.data_ptr(), self._threads,
        )  # fmt: skip
        return out

    def _places(self, layer: int, shape: LayerShape) -> tuple[int, int]:
        """Addresses of the layer's K and V in slab 0."""
        layout = self._pool.layout
        keys = self._base + layout.layer_offsets[layer] * layout.itemsize
        return keys, keys + layout.block_size * shape.k_row * layout.itemsize


def unsupported(layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot serve such layers, or None."""
    if device.type != "cpu":
        return f"the C++ kernels run on CPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"the C++ kernels compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if any(shape.k_heads != shape.v_heads for shape in layers):
        return "keys and values have different numbers of heads"
    return None
