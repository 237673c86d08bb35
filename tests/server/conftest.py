"""A running server per session, around the real model, and OpenAI's client for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI

from running_server import RunningServer, running
from small_model import slow_down, small_engine

if TYPE_CHECKING:
    from kvboost import KVBoost


@pytest.fixture(scope="session")
def server(smollm2: KVBoost) -> Iterator[RunningServer]:
    """SmolLM2 behind HTTP. Shared: counts since the start are those of all tests so far. Mark its tests `real`."""
    with running(smollm2, shutdown_timeout=5.0) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: RunningServer) -> OpenAI:
    return server.client()


@pytest.fixture
def small() -> Iterator[KVBoost]:
    """A tiny random model: answers in milliseconds, of bytes."""
    with small_engine() as kv:
        yield kv


@pytest.fixture
def slow(small: KVBoost) -> KVBoost:
    """The same, 10 ms a step: 300 tokens take 3 s."""
    return slow_down(small, 0.01)
