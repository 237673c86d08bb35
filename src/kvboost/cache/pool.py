"""The device memory that holds slabs, and its views per layer. Knows bytes, not who owns them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvboost.cache.layout import SlabLayout
from kvboost.cache.pages import zeroed_buffer

AHEAD_BYTES = 64 << 20
"""Of RAM that is taken before blocks need it: a prompt of 1,000 tokens of SmolLM2 in fp32. The system fills a fresh page
with zeros when it is first touched, at 0.7 GB/s in a virtual machine: 70 ms of such a prompt's 900."""


class KVPool:
    """`num_blocks` slabs in one tensor `[num_blocks, slab_elements]`.

    The memory starts as zeros: padded attention reads slots that were never written, and a stray NaN there would
    survive a zero weight.
    """

    def __init__(self, layout: SlabLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        if device.type == "cpu":
            self.slabs = zeroed_buffer(num_blocks * layout.slab_bytes).view(dtype).view(num_blocks, -1)
        else:
            self.slabs = torch.zeros(num_blocks, layout.slab_elements, dtype=dtype, device=device)
        self.keys: list[Tensor] = []
        """Per layer `[num_blocks, block_size, k_heads, k_dim]`."""
        self.values: list[Tensor] = []
        """Per layer `[num_blocks, block_size, v_heads, v_dim]`."""
        self._key_rows: list[Tensor] = []
        self._value_rows: list[Tensor] = []
        stride, size = layout.slab_elements, layout.block_size
        base = self.slabs.storage_offset()  # as_strided counts from the storage, not from the view
        for shape, offset in zip(layout.layers, (base + o for o in layout.layer_offsets), strict=True):
            k_elements = size * shape.k_row
            self.keys.append(
                self.slabs.as_strided(
                    (num_blocks, size, shape.k_heads, shape.k_dim), (stride, shape.k_row, shape.k_dim, 1), offset
                )
            )
            self.values.append(
                self.slabs.as_strided(
                    (num_blocks, size, shape.v_heads, shape.v_dim),
                    (stride, shape.v_row, shape.v_dim, 1),
                    offset + k_elements,
                )
            )
            self._key_rows.append(self.slabs.as_strided((num_blocks, k_elements), (stride, 1), offset))
            self._value_rows.append(
                self.slabs.as_strided((num_blocks, size * shape.v_row), (stride, 1), offset + k_elements)
            )
        self._workspaces = {"k": self.slabs.new_empty(0), "v": self.slabs.new_empty(0)}
        self._num_taken = 0 if device.type == "cpu" else num_blocks

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes

    def take_ahead(self, num_touched: int) -> bool:
        """Have the system give memory to one more block, when there are few with memory among those from `num_touched` on,
        which were never used. False when there was nothing to do."""
        block = max(self._num_taken, num_touched)
        if block >= self.num_blocks or (block - num_touched) * self.layout.slab_bytes >= AHEAD_BYTES:
            return False
        self.slabs[block].zero_()
        self._num_taken = block + 1
        return True

    def write(self, layer: int, block: Tensor, offset: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key[T, k_heads, k_dim]` and `value[T, v_heads, v_dim]` at slots `(block[T], offset[T])`."""
        self.keys[layer][block, offset] = key
        self.values[layer][block, offset] = value

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slabs; every source is read before any target is written."""
        read = [self.slabs[source].clone() for source in sources]  # an indexed copy is 20 times slower on a CPU
        for target, slab in zip(targets, read, strict=True):
            self.slabs[target].copy_(slab)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the blocks of `tables[S, B]` out of the pool.

        Returns K `[S, k_heads, B * block_size, k_dim]` and V alike, as views of workspaces that the next call
        overwrites. A fresh buffer each time would cost a page fault per 4 KiB: 15 ms instead of 2 ms for 64 x 400
        tokens of SmolLM2 on a CPU.
        """
        shape = self.layout.layers[layer]
        k = self._take("k", self._key_rows[layer], tables, shape.k_heads, shape.k_dim)
        v = self._take("v", self._value_rows[layer], tables, shape.v_heads, shape.v_dim)
        return k, v

    def _take(self, name: str, rows: Tensor, tables: Tensor, heads: int, dim: int) -> Tensor:
        needed = tables.numel() * rows.shape[1]
        if self._workspaces[name].numel() < needed:
            self._workspaces[name] = self.slabs.new_empty(needed)
        out = self._workspaces[name][:needed].view(-1, rows.shape[1])
        torch.index_select(rows, 0, tables.reshape(-1), out=out)
        return out.view(tables.shape[0], -1, heads, dim).transpose(1, 2)
