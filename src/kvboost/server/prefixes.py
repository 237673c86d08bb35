"""Which prefixes were found again most often. Keeps hashes and counts, never text. Plain Python, no torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvboost.engine.request import Request


@dataclass(slots=True)
class _Node:
    parent: bytes | None
    num_blocks: int
    hits: int


class PrefixHits:
    """Counts, for each block key, the requests that found it. Holds at most `limit` keys, the latest found.

    A prefix that is reported ends where requests parted: at a block found more often than any that follows it.
    Hashes are keyed with a secret of this process: they tell prefixes apart, and confirm nobody's guess of a text.
    """

    def __init__(self, limit: int, block_size: int) -> None:
        self._limit = max(limit, 1)
        self._block_size = block_size
        self._nodes: dict[bytes, _Node] = {}
        self._secret = secrets.token_bytes(32)

    def note(self, request: Request) -> None:
        """The blocks that `request` found are used once more. Call when its first token is made."""
        found = (request.cached_tokens or 0) // self._block_size
        parent = None
        for i, key in enumerate(request.keys[:found]):
            node = self._nodes.pop(key, None) or _Node(parent, i + 1, 0)
            node.hits += 1
            self._nodes[key] = node  # the latest last
            parent = key
        while len(self._nodes) > self._limit:
            del self._nodes[next(iter(self._nodes))]

    def top(self, count: int) -> list[tuple[bytes, dict[str, Any]]]:
        """(key, facts) of the `count` prefixes that saved the most tokens."""
        followed: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                followed[node.parent] = max(followed.get(node.parent, 0), node.hits)
        ends = [(node.hits * node.num_blocks, key, node) for key, node in self._nodes.items()
                if node.hits > followed.get(key, 0)]  # fmt: skip
        ends.sort(key=lambda end: end[:2], reverse=True)
        return [(key, self._facts(key, node)) for _, key, node in ends[:count]]

    def _facts(self, key: bytes, node: _Node) -> dict[str, Any]:
        tokens = node.num_blocks * self._block_size
        name = blake2b(key, digest_size=8, key=self._secret).hexdigest()
        return {"hash": name, "tokens": tokens, "hits": node.hits, "saved_tokens": node.hits * tokens}

    def clear(self) -> None:
        self._nodes.clear()
