"""Serves a model until SIGTERM or Ctrl-C: binds, says when it is ready and what the start cost, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from kvboost.api.kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.server.app import create_app
from kvboost.server.errors import ApiError
from kvboost.server.protocol import bounded_protocol
from kvboost.server.settings import ServerConfig
from kvboost.server.tracing import Tracing

log = logging.getLogger("kvboost.server")

CUT_SECONDS = 2.0
"""After the shutdown timeout running requests are told, and get this long to send it."""

KEEP_ALIVE_SECONDS = 30

BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn's server, which ends with exit code 0 after a signal and tells running requests before it cuts them."""

    def __init__(self, config: uvicorn.Config, settings: ServerConfig, app: Any) -> None:
        super().__init__(config)
        self._settings = settings
        self._app = app

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: an ordered end is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only: whoever started this one stops the server
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("%s: finishing what runs (%g s at most)", signal.Signals(sig).name, self._settings.shutdown_timeout)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            log.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self._app.state.server
        state.ready = False  # /ready says no, and event streams end
        cut = asyncio.ensure_future(self._cut_later(state))
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    async def _cut_later(self, state: Any) -> None:
        await asyncio.sleep(self._settings.shutdown_timeout)
        for generation in list(state.live):
            generation.fail(ApiError(503, "The server is shutting down.", code="shutting_down"))


def make_server(kv: KVBoost, settings: ServerConfig, model_name: str) -> Server:
    """A server around `kv`, not yet bound. Run it with `server.run(sockets=[bind(settings)])`. Raises `ConfigError`."""
    return _around(kv, settings, model_name, open_tracing(settings, model_name))


def _around(kv: KVBoost, settings: ServerConfig, model_name: str, tracing: Tracing | None) -> Server:
    app = create_app(kv, settings, model_name, tracing)
    config = uvicorn.Config(
        app, log_config=None, http=bounded_protocol(settings.client_timeout), ws="none", lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=int(settings.shutdown_timeout + CUT_SECONDS) + 1,
        server_header=False, backlog=BACKLOG, proxy_headers=False,
    )  # fmt: skip
    return Server(config, settings, app)


def serve(load: Callable[[], KVBoost], settings: ServerConfig, model_name: str) -> None:
    """Load a model and serve it until a signal. What can be wrong with the options is found before the model is loaded.

    Raises `ConfigError` and what `load` raises.
    """
    imported, began = seconds_since_start_of_process(), time.perf_counter()
    template = read_template(settings)
    tracing = open_tracing(settings, model_name)
    listener = bind(settings)
    bound = time.perf_counter()
    with load() as kv:
        if template is not None:
            kv.tokenizer.chat_template = template
        loaded = time.perf_counter() - bound
        server = _around(kv, settings, model_name, tracing)
        parts = {"imports": imported, "load": loaded - kv.build_seconds, "engine": kv.build_seconds,
                 "bind": bound - began}  # fmt: skip
        announce(kv, settings, model_name, parts)
        server.run(sockets=[listener])


def open_tracing(settings: ServerConfig, model_name: str) -> Tracing | None:
    """Raises `ConfigError` when the extra `otlp` is missing."""
    endpoint = settings.otlp_traces_endpoint
    return None if endpoint is None else Tracing(endpoint, model_name)


def bind(settings: ServerConfig) -> socket.socket:
    """The socket that takes the address; it is listened to when the server runs. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError("port" if error.errno == errno.EADDRINUSE else "host",
                          f"cannot listen on {settings.host}:{settings.port} ({error.strerror}). "
                          "Choose another with --port, or 0 for a free one.") from error  # fmt: skip
    return listener


def read_template(settings: ServerConfig) -> str | None:
    """The text of `--chat-template`. Raises `ConfigError`."""
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"cannot read {settings.chat_template}: {error}.") from error


def announce(kv: KVBoost, settings: ServerConfig, model_name: str, parts: dict[str, float]) -> None:
    """Says what the start cost, what there is room for, and what is risky about the options."""
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    log.info("start: %s; total %.1f s", times, sum(parts.values()))
    log.info("%s: %d tokens per sequence, KV for %d tokens", model_name, kv.max_model_len,
             (kv.config.num_blocks or 0) * kv.config.block_size)  # fmt: skip
    if not settings.on_loopback and not settings.api_key:
        log.warning("anyone who reaches %s can use this server: it has no API key (--api-key)", settings.host)


def configure_logging(level: str) -> None:
    """Lines on standard error. Prompts and answers are in none of them."""
    logging.basicConfig(level=getattr(logging, level.upper()), format="%(asctime)s %(levelname)s %(message)s",
                        datefmt="%H:%M:%S", stream=sys.stderr)  # fmt: skip
    if level != "debug":  # uvicorn warns of every request that is no HTTP: whoever can connect could fill the disk
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def seconds_since_start_of_process() -> float:
    """Age of this process; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
