"""Reference counts and the order in which unreferenced blocks are taken again."""

from __future__ import annotations

import random

import pytest

from kvboost.cache.blocks import BlockPool


def filled(num_blocks: int, names: str) -> tuple[BlockPool, list[int]]:
    """A pool with one held sequence whose blocks are named a, b, c, ..."""
    pool = BlockPool(num_blocks)
    table = [pool.allocate() for _ in names]
    for block, name in zip(table, names, strict=True):
        pool.name(block, name.encode())
    return pool, table


def found(pool: BlockPool, names: str) -> str:
    return "".join(name for name in names if pool.find([name.encode()], 1))


def test_every_block_can_be_taken_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert (pool.num_free, pool.num_referenced) == (0, 3)
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_released_block_stays_findable_until_it_is_taken() -> None:
    pool, table = filled(2, "ab")
    pool.release(table)
    assert pool.num_free == 2 and found(pool, "ab") == "ab"
    pool.allocate()
    assert found(pool, "ab") == "a" and pool.num_cached == 1
    pool.allocate()
    assert pool.num_cached == 0
    pool.check()


def test_a_prefix_outlives_its_continuation() -> None:
    pool, table = filled(4, "abcd")
    pool.release(table)
    survivors = []
    for _ in range(4):
        pool.allocate()
        survivors.append(found(pool, "abcd"))
    assert survivors == ["abc", "ab", "a", ""]


def test_least_recently_used_goes_first_and_use_renews() -> None:
    pool, table = filled(3, "abc")
    for block in table:
        pool.release([block])
    pool.retain(pool.find([b"a"], 1))
    pool.release([table[0]])
    pool.allocate()
    assert found(pool, "abc") == "ac"
    pool.allocate()
    assert found(pool, "abc") == "a"


def test_blocks_without_a_key_go_first() -> None:
    pool, table = filled(3, "ab")
    unnamed = pool.allocate()
    pool.release(table)
    pool.release([unnamed])
    assert pool.allocate() == unnamed
    assert found(pool, "ab") == "ab"


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool, table = filled(2, "a")
    pool.retain(table)
    pool.release(table)
    assert not pool.is_free(table[0]) and pool.num_free == 1
    pool.release(table)
    assert pool.is_free(table[0])
    pool.check([])


def test_releasing_too_often_is_noticed() -> None:
    pool, table = filled(2, "a")
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_a_forgotten_block_is_not_found_and_goes_first() -> None:
    pool, table = filled(3, "abc")
    pool.release(table)
    pool.forget(table[0])
    assert found(pool, "abc") == "bc"
    assert pool.allocate() == table[0]
    pool.forget(table[0])  # no key: no effect
    pool.check([[table[0]]])


def test_forgetting_everything_keeps_references() -> None:
    pool, table = filled(3, "ab")
    pool.forget_all()
    assert pool.num_cached == 0 and pool.num_referenced == 2
    pool.check([table])


def test_without_sharing_nothing_is_found() -> None:
    pool = BlockPool(2, share=False)
    pool.name(pool.allocate(), b"a")
    assert pool.find([b"a"], 1) == [] and pool.num_cached == 0


def test_check_compares_with_the_holders() -> None:
    pool, table = filled(3, "ab")
    pool.check([table])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([table, table])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


def test_check_notices_a_damaged_list() -> None:
    pool, _ = filled(4, "a")
    pool._prev[pool._tail] = 0
    with pytest.raises(AssertionError, match="LRU"):
        pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_tables_are_retained_as_one_block_after_another(seed: int) -> None:
    """Whole, in part, in other orders, shared with others, from either end of the list or its middle."""
    rng = random.Random(seed)
    together, singly = BlockPool(40), BlockPool(40)
    for pool in (together, singly):
        tables = [[pool.allocate() for _ in range(count)] for count in (9, 1, 14, 6)]
        for table in tables:
            for block in table:
                pool.name(block, b"%d" % block)
            pool.release(table)
    held: list[list[int]] = []
    for _ in range(60):
        table = rng.choice(tables)
        begin = rng.randrange(len(table))
        chosen = table[begin : begin + rng.randrange(1, len(table) - begin + 1)]
        if rng.random() < 0.3:
            rng.shuffle(chosen)
        if rng.random() < 0.2:
            chosen = chosen + rng.choice(tables)
        chosen = list(dict.fromkeys(chosen))
        together.retain(chosen)
        for block in chosen:
            singly.retain([block])
        held.append(chosen)
        while held and rng.random() < 0.6:
            done = held.pop(rng.randrange(len(held)))
            together.release(done)
            singly.release(done)
        together.check(held)
    while together.num_free:
        assert together.allocate() == singly.allocate(), "the same order of reuse"
