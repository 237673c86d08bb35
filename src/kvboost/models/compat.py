"""The compatibility path: models whose attention we cannot replace run it themselves, over a cache made from slabs.

One sequence at a time: the cache of Transformers is filled from the pool, the model adds its new keys and values, and
those go back into the pool. Slower than paged attention, but exact, paged and shared like everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from kvboost.cache.pool import KVPool


def load_cache(pool: KVPool, table: Tensor, length: int) -> DynamicCache:
    """A `DynamicCache` that holds the first `length` tokens of the block table `[B]`."""
    cache = DynamicCache()
    if length == 0:
        return cache
    blocks = table[: -(-length // pool.layout.block_size)].unsqueeze(0)
    for layer in range(len(pool.layout.layers)):
        k, v = pool.gather(layer, blocks)
        cache.update(k[:, :, :length].clone(), v[:, :, :length].clone(), layer)
    return cache


def store_cache(pool: KVPool, cache: DynamicCache, table: Tensor, start: int, count: int) -> None:
    """Write tokens `[start, start + count)` of the cache into their slots."""
    positions = torch.arange(start, start + count, device=table.device)
    block, offset = table[positions // pool.layout.block_size], positions % pool.layout.block_size
    for layer in range(len(pool.layout.layers)):
        held = cache.layers[layer]
        pool.write(layer, block, offset, *(_rows(x, start, count) for x in (held.keys, held.values)))


def _rows(held: Tensor, start: int, count: int) -> Tensor:
    """`[1, heads, L, dim]` to `[count, heads, dim]`."""
    return held[0, :, start : start + count].transpose(0, 1)
