"""Who holds which block of the pool: reference counts, LRU reuse, prefix sharing. Policy: plain Python, no torch.

A block is in exactly one of two states:

    referenced    refs > 0     part of some sequence's block table, or pinned
    unreferenced  refs == 0    on the LRU list; still findable by its key until it is taken for something else
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvboost.cache.prefix import PrefixIndex, token_bytes

NIL = -1


class BlockPool:
    """Reference counts of `num_blocks` blocks and the LRU list of the unreferenced ones, all O(1).

    The list is doubly linked through two integer arrays (8 bytes a block). Blocks without a key are reused first:
    nothing is lost with them.
    """

    def __init__(self, num_blocks: int, *, share: bool = True) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.num_free = 0
        self.num_touched = 0
        """Blocks from this one on were never taken."""
        self._share = share
        self._refs = array("i", [0]) * num_blocks
        self._prev = array("i", [NIL]) * num_blocks
        self._next = array("i", [NIL]) * num_blocks
        self._head = self._tail = NIL
        for block in range(num_blocks):
            self._push_newest(block)

    # -- taking and giving back ------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take the least recently used unreferenced block; what it held is forgotten.

        Raises `IndexError` when every block is referenced: callers look at `num_free` first.
        """
        block = self._head
        if block == NIL:
            raise IndexError("no unreferenced block")
        self._unlink(block)
        self.index.remove(block)
        self._refs[block] = 1
        if block >= self.num_touched:
            self.num_touched = block + 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block. Neighbours on the list, as a released table leaves them, are taken off together."""
        refs, prev = self._refs, self._prev
        newest = oldest = NIL
        for block in blocks:
            refs[block] += 1
            if refs[block] > 1:
                continue
            self.num_free -= 1
            if oldest == NIL or prev[oldest] != block:
                self._take_off(oldest, newest)
                newest = block
            oldest = block
        self._take_off(oldest, newest)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a table, given in position order.

        The last block becomes reusable first, so that a prefix outlives its continuations.
        """
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise AssertionError(f"block {block} released more often than it was taken")
            self._refs[block] = refs
            if refs == 0:
                if self.index.knows(block):
                    self._push_newest(block)
                else:
                    self._push_oldest(block)

    # -- sharing ---------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the longest known prefix; not retained yet."""
        return self.index.find(keys, limit) if self._share else []

    def name(self, block: int, key: bytes) -> None:
        """Let `block` be found by `key` from now on (no effect when another block already is)."""
        if self._share:
            self.index.add(key, block)

    def note_tail(self, parent: bytes, block: int, tokens: Sequence[int]) -> None:
        """`block` holds the KV of `tokens` (up to a block of them) after the block named `parent`."""
        if not self._share:
            return
        before = self.index.note_tail(parent, block, token_bytes(tokens))
        if before is not None and not self.index.knows(before):
            self._reuse_next(before)

    def find_tail(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(block, count): a block whose first `count` tokens after `parent` are those of `tokens`; count 0: none."""
        return self.index.find_tail(parent, token_bytes(tokens)) if self._share else (NIL, 0)

    def forget(self, block: int) -> None:
        """Make what `block` holds unfindable; an unreferenced block is reused next."""
        if self.index.knows(block):
            self.index.remove(block)
            self._reuse_next(block)

    def forget_all(self) -> None:
        """Forget every key; references stay."""
        for block in range(self.num_blocks):
            self.index.remove(block)

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by a key, referenced or not."""
        return len(self.index)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Verify every invariant; with `holders` (all block tables and pins) also every reference count.

        Raises `AssertionError` saying what is broken.
        """
        self.index.check()
        seen, block, before = 0, self._head, NIL
        while block != NIL:
            if self._refs[block] != 0 or self._prev[block] != before:
                raise AssertionError(f"LRU list broken at block {block}")
            seen, before, block = seen + 1, block, self._next[block]
            if seen > self.num_blocks:
                raise AssertionError("LRU list has a cycle")
        if before != self._tail or seen != self.num_free or seen != sum(1 for refs in self._refs if refs == 0):
            raise AssertionError("LRU list does not hold exactly the unreferenced blocks")
        if holders is not None:
            counts = array("i", [0]) * self.num_blocks
            for table in holders:
                for held in table:
                    counts[held] += 1
            if counts != self._refs:
                wrong = [b for b in range(self.num_blocks) if counts[b] != self._refs[b]]
                raise AssertionError(f"reference counts differ from the holders at blocks {wrong[:8]}")

    def _reuse_next(self, block: int) -> None:
        if self._refs[block] == 0:
            self._unlink(block)
            self._push_oldest(block)

    # -- the list --------------------------------------------------------------------------------------------------

    def _unlink(self, block: int) -> None:
        self._take_off(block, block)
        self.num_free -= 1

    def _take_off(self, oldest: int, newest: int) -> None:
        """Join what lies before `oldest` and behind `newest`, which are one block or follow one another; NIL: nothing."""
        if oldest == NIL:
            return
        before, after = self._prev[oldest], self._next[newest]
        if before == NIL:
            self._head = after
        else:
            self._next[before] = after
        if after == NIL:
            self._tail = before
        else:
            self._prev[after] = before

    def _push_newest(self, block: int) -> None:
        self._prev[block], self._next[block] = self._tail, NIL
        if self._tail == NIL:
            self._head = block
        else:
            self._next[self._tail] = block
        self._tail = block
        self.num_free += 1

    def _push_oldest(self, block: int) -> None:
        self._prev[block], self._next[block] = NIL, self._head
        if self._head == NIL:
            self._tail = block
        else:
            self._prev[self._head] = block
        self._head = block
        self.num_free += 1
