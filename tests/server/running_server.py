"""A server in a thread of the test process, on a free port: tests see both its HTTP side and its engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from openai import OpenAI

from kvboost.server.run import bind, make_server
from kvboost.server.settings import ServerConfig
from kvboost.server.state import ServerState

if TYPE_CHECKING:
    from kvboost import KVBoost

NAME = "smollm2"


class RunningServer:
    """Runs until `stop`. Settings are fields of `ServerConfig`."""

    def __init__(self, kv: KVBoost, **settings: Any) -> None:
        self.kv = kv
        self.settings = ServerConfig(**{"port": 0, "served_model_name": (NAME,), **settings})
        self._server = make_server(kv, self.settings, NAME)
        listener = bind(self.settings)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < end and self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)

    @property
    def state(self) -> ServerState:
        state: ServerState = self._server.config.app.state.server  # type: ignore[union-attr]
        return state

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's own client. It does not retry: a test wants to see the first answer."""
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120, **options}
        return OpenAI(**given)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until nothing runs or waits, and no block is referenced but by pins; then check every invariant."""
        end = time.monotonic() + seconds
        while True:
            stats = self.kv.stats()
            if not stats.num_running and not stats.num_waiting and stats.blocks_referenced == stats.blocks_pinned:
                break
            assert time.monotonic() < end, f"still busy after {seconds} s: {stats}"
            time.sleep(0.02)
        self.kv.check()

    def stop(self, seconds: float = 60.0) -> None:
        self._server.should_exit = True
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def running(kv: KVBoost, **settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(kv, **settings)
    try:
        yield server
        server.wait_idle()
    finally:
        server.stop()
