"""Prefix keys name KV: equal keys mean equal namespace, salt and every token so far, in any process."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from kvboost.cache import prefix
from kvboost.cache.prefix import KEY_BYTES, KeyMemo, PrefixIndex, extend_keys, root_key, token_bytes


def keys_of(
    tokens: list[int], *, salt: str | None = None, namespace: bytes = b"weights", block_size: int = 4
) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(namespace, salt), tokens, block_size)
    return keys


def test_keys_never_change() -> None:
    """Stored KV would be lost by another hash. Change these figures only together with the layout's fingerprint."""
    assert root_key(b"weights").hex() == "81e495aa25b0da33b273294a4cd90196"
    assert root_key(b"weights", "tenant").hex() == "a9600f8869b2564bdcb1282a78d48b09"
    assert [key.hex() for key in keys_of([1, 2, 3, 4, 5, 6, 2**32 - 1, 0, 9])] == [
        "5771da70c80db719deeab6c2b8aff0de",
        "25fb588a9f48f5d03e77c0685ad640ca",
    ]


def test_another_process_makes_the_same_keys() -> None:
    code = (
        "from kvboost.cache.prefix import *; keys = []; extend_keys(keys, root_key(b'weights', 's'), range(12), 4); "
        "print(*(k.hex() for k in keys))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.split() == [key.hex() for key in keys_of(list(range(12)), salt="s")]


def test_a_key_covers_everything_before_its_block() -> None:
    a, b = keys_of([1, 2, 3, 4, 5, 6, 7, 8]), keys_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[1] != b[1]
    assert keys_of([1, 2, 3, 4, 99, 6, 7, 8])[0] == a[0]
    assert len({*a, *b}) == 4 and all(len(key) == KEY_BYTES for key in a)


def test_salt_and_namespace_separate() -> None:
    variants = [
        keys_of([1, 2, 3, 4]),
        keys_of([1, 2, 3, 4], salt=""),
        keys_of([1, 2, 3, 4], salt="a"),
        keys_of([1, 2, 3, 4], salt="\ud800"),  # a lone surrogate is a salt as good as any
        keys_of([1, 2, 3, 4], namespace=b"other weights"),
        keys_of([1, 2, 3, 4], namespace=b"x" * 200),
    ]
    assert len({keys[0] for keys in variants}) == len(variants)


def test_only_full_blocks_have_keys_and_known_keys_are_kept() -> None:
    tokens, root = [1, 2, 3, 4, 5, 6, 7, 8, 9], root_key(b"weights")
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, 4, upto=3)
    assert keys == []
    extend_keys(keys, root, tokens, 4, upto=7)
    assert keys == keys_of(tokens)[:1]
    extend_keys(keys, root, tokens, 4)
    assert keys == keys_of(tokens) and len(keys) == 2
    extend_keys(keys, root, tokens, 4, upto=4)
    assert len(keys) == 2


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        keys_of([1, 2, 3, token])


def test_find_stops_at_the_first_unknown_key() -> None:
    index = PrefixIndex(4)
    for key, block in [(b"a", 3), (b"b", 1), (b"d", 2)]:
        assert index.add(key, block)
    assert index.find([b"a", b"b", b"c", b"d"]) == [3, 1]
    assert index.find([b"a", b"b"], limit=1) == [3]
    assert index.find([b"c"]) == [] and index.find([]) == []


def test_the_first_block_of_a_key_stays() -> None:
    index = PrefixIndex(3)
    assert index.add(b"a", 0)
    assert not index.add(b"a", 1) and index.find([b"a"]) == [0]
    assert not index.add(b"b", 0) and index.key_of(0) == b"a"
    index.remove(0)
    index.remove(0)
    assert len(index) == 0 and index.add(b"a", 1) and index.find([b"a"]) == [1]
    index.check()


def test_check_notices_damage() -> None:
    index = PrefixIndex(2)
    index.add(b"a", 0)
    index._block_of[b"a"] = 1
    with pytest.raises(AssertionError):
        index.check()


# -- keys of recent prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_remembered_keys_are_the_hashed_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share beginnings of any length, under two roots, more of them than are remembered."""
    rng = random.Random(seed)
    monkeypatch.setattr(KeyMemo, "SMALLEST_BLOCKS", 2)
    memo = KeyMemo(4)
    roots = (root_key(b"weights"), root_key(b"weights", "salt"))
    seen: list[list[int]] = [[]]
    for _ in range(60):
        begin = rng.choice(seen)
        tokens = begin[: rng.randint(0, len(begin))] + rng.choices([1, 2], k=rng.randint(0, 40))
        seen.append(tokens)
        root = rng.choice(roots)
        expected: list[bytes] = []
        extend_keys(expected, root, tokens, 4)
        keys: list[bytes] = []
        memo.fill(keys, root, tokens, token_bytes(tokens))
        assert keys == expected
        later = [*tokens, 3, 3, 3, 3]  # a request that has grown since
        memo.fill(keys, root, later, token_bytes(later))
        extend_keys(expected, root, later, 4)
        assert keys == expected


def test_what_is_common_with_a_recent_prompt_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    memo, root = KeyMemo(16), root_key(b"weights")
    first = list(range(16 * 100))
    memo.fill([], root, first, token_bytes(first))
    hashed = []
    original = prefix._append_keys

    def counted(keys: list[bytes], root: bytes, data: bytes, begin: int, step: int) -> None:
        hashed.append((len(data) - begin) // step)
        original(keys, root, data, begin, step)

    monkeypatch.setattr(prefix, "_append_keys", counted)
    memo.fill([], root, first[: 16 * 90] + [7] * 64, token_bytes(first[: 16 * 90] + [7] * 64))
    assert hashed == [4]
