"""What a request must pass before the API sees it: host, origin, key, size and speed of the body, depth of its JSON.

One ASGI middleware before everything else, so that a refused request costs next to nothing, and every failure has one form.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.answers import error_response
from kvboost.server.errors import ApiError
from kvboost.server.settings import ApiKey, ServerConfig

log = logging.getLogger("kvboost.server")

PUBLIC = ("/", "/health", "/ready", "/version")
PUBLIC_FOLDER = "/page/"
"""Served without a key: probes have none, and the page is the same for everybody. It asks for the key."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

MAX_DEPTH = 100
"""Levels of JSON. Python's parser, pydantic and templates recurse; none of them is near its limit here."""

SLOWEST_BYTES_PER_SECOND = 32 * 1024
"""A body may take `client_timeout` and as long as it would at this rate: 1.4 minutes for the largest by default."""

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")


class Guard:
    """Invariant: whatever happens behind it, a client that still listens gets one well-formed response."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._keys = config.keys
        self._hosts = LOOPBACK_NAMES | {config.host.lower(), *(h.lower() for h in config.allowed_hosts)}
        self._origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                scope["app"].state.server.metrics.response(message["status"])
            await send(message)

        try:
            headers = _headers(scope)
            self._check_host(headers)
            self._check_origin(headers)
            self._check_key(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                receive = _replay(await self._read_body(headers, receive), receive)
            await self._app(scope, receive, watched)
        except _Gone:
            pass
        except Exception as error:
            if started:
                raise  # uvicorn cuts the connection: the client sees that something is missing
            await error_response(error)(scope, receive, watched)

    # -- who asks ----------------------------------------------------------------------------------------------------

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """On loopback a foreign name in `Host` is a web page whose name was rebound to this machine."""
        if not self._config.on_loopback:
            return
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if host not in self._hosts:
            raise ApiError(421, f"The Host header names {host[:100]!r}; this server answers to "
                           f"{', '.join(sorted(self._hosts))}. Add names with --allowed-hosts.", code="wrong_host")  # fmt: skip

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Browsers say which page sends a request. Simple ones come without asking first: they are refused here."""
        origin = headers.get(b"origin")
        if origin is None or "*" in self._origins or origin.decode("latin-1") in self._origins:
            return
        if origin.decode("latin-1").partition("://")[2].lower() != headers.get(b"host", b"").decode("latin-1").lower():
            raise ApiError(403, "Pages of this origin may not call the server. Allow it with --allowed-origins.",
                           code="wrong_origin")  # fmt: skip

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        path: str = scope["path"]
        if not self._keys or path in PUBLIC or path.startswith(PUBLIC_FOLDER):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        found: ApiKey | None = None
        for key in self._keys:  # all of them, always: the time tells nothing about which one is close
            if hmac.compare_digest(given, key.key.encode()):
                found = key
        if found is None or scheme.lower() != b"bearer":
            raise ApiError(401, "This server needs an API key: Authorization: Bearer KEY.", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        scope["kvboost.key"] = found

    # -- what is sent ------------------------------------------------------------------------------------------------

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The whole body. Raises `ApiError` 400, 408 or 413."""
        limit = self._config.max_body_bytes
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            raise self._too_large(close=int(announced) > 4 * limit)
        pieces: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._config.client_timeout) as timeout:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    size += len(piece)
                    if size > limit:
                        raise self._too_large(close=True)
                    pieces.append(piece)
                    timeout.reschedule(began + self._config.client_timeout + size / SLOWEST_BYTES_PER_SECOND)
        except TimeoutError:
            raise ApiError(408, "The body came too slowly (--client-timeout).", code="body_timeout",
                           headers={"Connection": "close"}) from None  # fmt: skip
        body = b"".join(pieces)
        require_shallow(body)
        return body

    def _too_large(self, *, close: bool) -> ApiError:
        """Small excess is read and thrown away, so that the client gets to the answer; beyond it the connection ends."""
        return ApiError(413, f"The body is larger than {self._config.max_body_mib:g} MiB (--max-body-mib).",
                        code="body_too_large", headers={"Connection": "close"} if close else None)  # fmt: skip


class _Gone(Exception):
    """The client left while it sent its body."""


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Headers by name. Those that decide who is let in may come once only. Raises `ApiError` 400."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (b"host", b"authorization", b"origin", b"content-length"):
            raise ApiError(400, f"The header {name.decode('latin-1')} is given twice.", code="duplicate_header")
        found[name] = value
    return found


def _host_name(host: str) -> str:
    """`[::1]:8000` is `::1`, `localhost:8000` is `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read already, then what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def require_shallow(body: bytes) -> None:
    """Raise `ApiError` 400 for JSON of more than `MAX_DEPTH` levels, before any parser recurses into it."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for byte in _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
