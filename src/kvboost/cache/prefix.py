"""Prefix keys and the index that finds a block by them. Policy: plain Python, no torch.

A prefix key names the KV of one full block *and everything before it*: `H(parent key, block tokens)`, with the
namespace (weights, layout, adapter, cache salt) in the first parent. Equal keys mean equal KV, in every process.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

TOKEN_BYTES = 4

KEY_BYTES = 16
"""128 bits: among 2**40 blocks the chance of any collision is below 1e-14."""


def root_key(namespace: bytes, cache_salt: str | None = None) -> bytes:
    """The parent of a sequence's first block. Different salts can never match each other's KV."""
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=KEY_BYTES, key=blake2b(namespace, digest_size=32).digest()).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, upto: int | None = None
) -> None:
    """Append the keys of the full blocks of `tokens[:upto]` that `keys` does not hold yet.

    Token ids are hashed as little-endian uint32, so that a key is the same on every machine.
    """
    end = (len(tokens) if upto is None else upto) // block_size
    start = len(keys)
    if start >= end:
        return
    _append_keys(keys, root, token_bytes(tokens[start * block_size : end * block_size]), 0, block_size * TOKEN_BYTES)


def _append_keys(keys: list[bytes], root: bytes, data: bytes, begin: int, step: int) -> None:
    """Keys of the blocks of `step` bytes in `data[begin:]`, which follow those of `keys`."""
    parent = keys[-1] if keys else root
    for offset in range(begin, len(data), step):
        parent = blake2b(parent + data[offset : offset + step], digest_size=KEY_BYTES).digest()
        keys.append(parent)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class KeyMemo:
    """Keys of recent long prompts: what a new one has in common with them is compared, not hashed again.

    Hashing 32,000 tokens takes 3 to 5 ms, comparing them 0.02 ms; a chat's next turn or a question about the same
    documents begins like a prompt that was just seen.
    """

    SMALLEST_BLOCKS = 32
    ENTRIES = 16

    def __init__(self, block_size: int) -> None:
        self._step = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._recent: deque[tuple[bytes, bytes, list[bytes]]] = deque(maxlen=self.ENTRIES)

    def fill(self, keys: list[bytes], root: bytes, tokens: Sequence[int], packed: bytes) -> None:
        """`extend_keys` for all of `tokens`. packed: the first of them as `token_bytes` makes them, all while there are no keys."""
        count = len(tokens) // self._block_size
        if keys or count < self.SMALLEST_BLOCKS or len(packed) < count * self._step:
            extend_keys(keys, root, tokens, self._block_size)
            return
        data = packed[: count * self._step]
        common, known = 0, None
        for entry in self._recent:
            begin, end = common * self._step, (common + 1) * self._step
            if entry[0] != root or data[begin:end] != entry[1][begin:end]:
                continue  # it has no more in common than another
            if (blocks := self._common(data, entry[1])) > common:
                common, known = blocks, entry
        if known is not None:
            keys.extend(known[2][:common])
            if common == len(known[2]):  # it goes on where that one ended, and stands for it from now on
                self._recent.remove(known)
        _append_keys(keys, root, data, common * self._step, self._step)
        self._recent.appendleft((root, data, list(keys)))

    def _common(self, a: bytes, b: bytes) -> int:
        """Blocks that both begin with."""
        low, high = 0, min(len(a), len(b)) // self._step
        while low < high:
            middle = (low + high + 1) // 2
            if a[low * self._step : middle * self._step] == b[low * self._step : middle * self._step]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefixIndex:
    """Which block holds the KV of which key, and which block last followed which.

    Two ways to find a block. By key: its whole content is known to be wanted. By *tail*: it came after the wanted
    parent and begins with some of the wanted tokens; those can be copied. A tail may be a partly filled block, the end
    of an answer say. Each parent remembers the one that was noted last.

    Invariants: `_block_of[key] == block` exactly when `_key_of[block] == key`; `_tail_of[parent] == block` exactly when
    `_tail[block] == parent + tokens` (one object of bytes: a million of them are held).
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._tail_of: dict[bytes, int] = {}
        self._tail: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def key_of(self, block: int) -> bytes | None:
        return self._key_of[block]

    def find(self, keys: Sequence[bytes], limit: int | None = None) -> list[int]:
        """The blocks of the longest run of known keys from the start, at most `limit` of them."""
        found = list(map(self._block_of.get, keys if limit is None else keys[:limit]))
        if None in found:
            del found[found.index(None) :]
        return found  # type: ignore[return-value]

    def add(self, key: bytes, block: int) -> bool:
        """Name `block` by `key`. False when another block already holds that KV; the first one stays."""
        if key in self._block_of or self._key_of[block] is not None:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def remove(self, block: int) -> None:
        """Forget what `block` holds."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
        tail = self._tail[block]
        if tail is not None:
            del self._tail_of[tail[:KEY_BYTES]]
            self._tail[block] = None

    def knows(self, block: int) -> bool:
        """Whether anything `block` holds can be found."""
        return self._key_of[block] is not None or self._tail[block] is not None

    def note_tail(self, parent: bytes, block: int, tokens: bytes) -> int | None:
        """`block` holds `tokens` (see `token_bytes`) after `parent`. Returns the block noted before, if another."""
        before = self._tail_of.get(parent)
        if before is not None:
            self._tail[before] = None
        own = self._tail[block]
        if own is not None and own[:KEY_BYTES] != parent:
            del self._tail_of[own[:KEY_BYTES]]
        self._tail_of[parent] = block
        self._tail[block] = parent + tokens
        return None if before == block else before

    def find_tail(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """(block, how many of its first tokens are the wanted ones), or (-1, 0)."""
        block = self._tail_of.get(parent)
        if block is None:
            return -1, 0
        held = (self._tail[block] or b"")[KEY_BYTES:]
        limit = min(len(held), len(tokens))
        same = 0
        while same < limit and held[same : same + TOKEN_BYTES] == tokens[same : same + TOKEN_BYTES]:
            same += TOKEN_BYTES
        return (block, same // TOKEN_BYTES) if same else (-1, 0)

    def check(self) -> None:
        """Raise `AssertionError` when the two directions disagree."""
        named = {block for block, key in enumerate(self._key_of) if key is not None}
        if named != set(self._block_of.values()) or len(named) != len(self._block_of):
            raise AssertionError("prefix index: keys and blocks disagree")
        followers = {tail[:KEY_BYTES]: block for block, tail in enumerate(self._tail) if tail is not None}
        if followers != self._tail_of or len(followers) != sum(tail is not None for tail in self._tail):
            raise AssertionError("prefix index: tails and blocks disagree")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise AssertionError(f"prefix index: block {block} is found by a key it does not have")
