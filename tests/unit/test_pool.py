"""The pool's views are where the layout says, and a slab is one block's bytes in all layers."""

from __future__ import annotations

import pytest
import torch

from kvboost.cache.blocks import BlockPool
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.cache.pool import KVPool

LAYOUT = SlabLayout((LayerShape(2, 8, 2, 4), LayerShape(1, 3, 1, 3)), block_size=4, dtype="float32", itemsize=4)


def pool(num_blocks: int = 6) -> KVPool:
    return KVPool(LAYOUT, num_blocks, torch.float32, torch.device("cpu"))


def write(target: KVPool, layer: int, block: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = LAYOUT.layers[layer]
    key, value = torch.randn(1, shape.k_heads, shape.k_dim), torch.randn(1, shape.v_heads, shape.v_dim)
    target.write(layer, torch.tensor([block]), torch.tensor([offset]), key, value)
    return key[0], value[0]


def test_a_slab_is_padded_and_its_layers_stand_in_order() -> None:
    assert LAYOUT.bytes_per_token == (16 + 8 + 3 + 3) * 4
    assert LAYOUT.slab_bytes == 512  # 480 bytes of content
    assert LAYOUT.layer_offsets == (0, 4 * 24)


def test_what_is_written_lies_in_its_blocks_slab_and_nowhere_else() -> None:
    kv = pool()
    key, value = write(kv, 1, block=3, offset=2)
    slab = kv.slabs[3]
    at = LAYOUT.layer_offsets[1]
    assert torch.equal(slab[at + 2 * 3 : at + 3 * 3], key.flatten())
    assert torch.equal(slab[at + 4 * 3 + 2 * 3 : at + 4 * 3 + 3 * 3], value.flatten())
    assert kv.slabs.count_nonzero() == 6


def test_a_gather_gives_tokens_in_table_order() -> None:
    kv = pool()
    written = {(b, o): write(kv, 0, b, o) for b in (5, 1) for o in range(4)}
    keys, values = kv.gather(0, torch.tensor([[5, 1]]))
    assert keys.shape == (1, 2, 8, 8) and values.shape == (1, 2, 8, 4)
    for position, slot in enumerate([(5, o) for o in range(4)] + [(1, o) for o in range(4)]):
        assert torch.equal(keys[0, :, position], written[slot][0])
        assert torch.equal(values[0, :, position], written[slot][1])


def test_a_copied_slab_reads_like_its_source_in_every_layer() -> None:
    kv = pool()
    for layer in range(2):
        for offset in range(4):
            write(kv, layer, 2, offset)
    before = [[x.clone() for x in kv.gather(layer, torch.tensor([[2]]))] for layer in range(2)]
    kv.copy([2, 0], [4, 2])  # the source of one copy is the target of the other
    for layer in range(2):
        for now, then in zip(kv.gather(layer, torch.tensor([[4]])), before[layer], strict=True):
            assert torch.equal(now, then)
    assert kv.slabs[2].count_nonzero() == 0


def test_fingerprints_differ_where_bytes_would() -> None:
    others = [
        SlabLayout(LAYOUT.layers, 8, "float32", 4),
        SlabLayout(LAYOUT.layers, 4, "bfloat16", 2),
        SlabLayout(LAYOUT.layers[::-1], 4, "float32", 4),
    ]
    assert len({LAYOUT.fingerprint, *(o.fingerprint for o in others)}) == 4


def test_memory_is_taken_ahead_of_the_blocks_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes, never more than there are, and nothing that was written is touched."""
    monkeypatch.setattr("kvboost.cache.pool.AHEAD_BYTES", 3 * LAYOUT.slab_bytes)
    memory = pool(8)
    memory.slabs[:2] = 7.0
    assert [memory.take_ahead(2) for _ in range(4)] == [True, True, True, False]
    assert not memory.take_ahead(1)
    assert [memory.take_ahead(4) for _ in range(3)] == [True, True, False]
    assert [memory.take_ahead(5) for _ in range(2)] == [True, False]
    assert not memory.take_ahead(8)
    assert (memory.slabs[:2] == 7.0).all() and not memory.slabs[2:].any()


def test_blocks_are_touched_in_order_and_those_with_memory_come_first() -> None:
    blocks = BlockPool(8)
    assert blocks.num_touched == 0
    taken = [blocks.allocate() for _ in range(3)]
    assert taken == [0, 1, 2] and blocks.num_touched == 3
    blocks.release(taken)
    assert blocks.allocate() < 3 and blocks.num_touched == 3
