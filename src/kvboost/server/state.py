"""What one server's requests share: the engine, the options, and the way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from kvboost.api.kvboost import KVBoost
from kvboost.engine.scheduler import Scheduler
from kvboost.server.generation import Generation
from kvboost.server.logprobs import TokenTexts
from kvboost.server.mailbox import Mailbox
from kvboost.server.metrics import Metrics
from kvboost.server.prefixes import PrefixHits
from kvboost.server.settings import ServerConfig
from kvboost.server.tracing import Tracing

T = TypeVar("T")

INLINE_CHARACTERS = 20_000
"""Texts up to here are tokenised on the event loop, in about 5 ms; a thread would cost more than it frees."""


class ServerState:
    """Made once per server, on its event loop. Route handlers get it with `Depends(server_state)`."""

    def __init__(
        self, kv: KVBoost, config: ServerConfig, model_name: str = "model", tracing: Tracing | None = None
    ) -> None:
        self.kv = kv
        self.config = config
        self.model_names = config.served_model_name or (model_name,)
        self.created = int(time.time())
        self.mailbox = Mailbox(kv.engine)
        self.tracing = tracing
        self.metrics = Metrics(self.model_names[0], self.mailbox)
        self.prefixes = PrefixHits(kv.config.num_blocks or 0, kv.config.block_size)
        self.texts = TokenTexts(kv.tokenizer)
        self.num_listeners = 0
        self.live: set[Generation] = set()
        self.ready = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvboost-tokenise")

    async def ask(self, function: Callable[[Scheduler], T]) -> T:
        """`function(scheduler)`, run in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.kv.engine.call_soon(function))

    async def prepare(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run work whose time grows with `size` characters, off the event loop when it would hold others up.

        One thread serves all requests: their prompts take turns, whatever their number.
        """
        if size <= INLINE_CHARACTERS:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: function(*arguments))

    def close(self) -> None:
        """Let go of the engine, which its owner closes."""
        self.ready = False
        self.mailbox.close()
        self._worker.shutdown(wait=False, cancel_futures=True)


def server_state(request: Request) -> ServerState:
    """The dependency of route handlers."""
    state: ServerState = request.app.state.server
    return state
