"""uvicorn's HTTP protocol with bounds on the head of a request: how long it may take, and how large it may be."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


def bounded_protocol(head_seconds: float) -> type[HttpToolsProtocol]:
    """A protocol class whose clients have `head_seconds` from connecting, or from the first byte of a later request, to
    the end of the headers. uvicorn bounds neither: a client that sends a byte a minute would keep its connection for ever.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            in_head = self._in_head
            super().data_received(data)
            if in_head and self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse(431)
            elif self.cycle is not None and self.cycle.response_complete:
                self._start()  # what follows an answer must become a request: uvicorn's idle timer is off now

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            self._start()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop()
            super().on_headers_complete()

        def _start(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(head_seconds, self._refuse, 408)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _refuse(self, status: int) -> None:
            self._stop()
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    return BoundedProtocol
