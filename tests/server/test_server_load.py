"""Many clients at once, of whom one in five leaves mid-stream: nothing fails, and nothing is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from kvboost import KVBoost
from running_server import NAME, running
from small_model import free_engine

LONG_RUN = bool(os.environ.get("KVBOOST_LONG"))

CLIENTS = 64
LEAVING = 0.2

TEXT = "The quick brown fox jumps over the lazy dog, and the river runs on to the sea. " * 5


async def crowd(url: str, *, seconds: float, lengths: tuple[int, ...], prompts: tuple[int, int]) -> Counter[str]:
    """How requests ended while `CLIENTS` clients asked for `seconds`. Raises on anything but an intended end.

    lengths: tokens to choose from. prompts: fewest and most characters.
    """
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    stop = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as web:

        async def client(number: int) -> None:
            choice = random.Random(number)
            while time.monotonic() < stop:
                length = choice.choice(lengths)
                body = {
                    "model": NAME,
                    "prompt": TEXT[: choice.randrange(*prompts)] + str(choice.random()),
                    "ignore_eos": True,
                    "max_tokens": length,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                leaves_after = choice.randrange(length) if choice.random() < LEAVING else None
                ends[await one(body, length, leaves_after)] += 1

        async def one(body: dict[str, object], length: int, leaves_after: int | None) -> str:
            lines: list[str] = []
            async with web.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        lines.append(line)
                        if leaves_after is not None and len(lines) > leaves_after:
                            return "left"
            assert lines[-1] == "data: [DONE]", lines[-1]
            assert json.loads(lines[-2][6:])["usage"]["completion_tokens"] == length
            return "whole"

        await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return ends


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_many_clients_of_whom_some_leave() -> None:
    with free_engine(num_blocks=4096, max_num_batched_tokens=2048) as kv, running(kv) as server:
        ends = asyncio.run(crowd(server.url, seconds=3, lengths=(4, 16, 60), prompts=(10, 170)))
        server.wait_idle()
        stats = kv.stats()
        assert stats.num_requests_finished == sum(ends.values()) and stats.blocks_referenced == 0
        assert ends["left"] and ends["whole"] and sum(ends.values()) >= CLIENTS
        assert not server.state.live


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.skipif(not LONG_RUN, reason="takes four minutes: set KVBOOST_LONG=1")
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads resident memory as Linux tells it")
def test_three_minutes_of_many_clients_on_the_real_model(smollm2: KVBoost) -> None:
    with running(smollm2, shutdown_timeout=5.0) as server:
        # Memory of the KV pool counts from its first use: use all of it now.
        smollm2.reset_cache()
        smollm2.engine.call(lambda _: smollm2.engine._runner._pool.slabs.fill_(0))
        asyncio.run(crowd(server.url, seconds=20, lengths=(4, 40), prompts=(10, 390)))  # every buffer has been used
        server.wait_idle()
        before = resident_bytes()
        ends = asyncio.run(crowd(server.url, seconds=180, lengths=(4, 16, 100), prompts=(10, 390)))
        server.wait_idle()
        after = resident_bytes()
        print(dict(ends), f"memory {before / 2**20:.0f} MiB before, {after / 2**20:.0f} after")
        assert smollm2.stats().blocks_referenced == 0 and not server.state.live
        assert after < 1.05 * before
