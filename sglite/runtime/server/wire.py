"""HTTP on one socket, with the limits that uvicorn's own protocol lacks: how long a request may take to arrive, how
large its head may be, and how long a client may leave an answer unread."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sglite.runtime.server.config import ServerConfig

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """A client that trickles its request, or sends none, is sent away after `receive_timeout_s`. One that stops reading
    is cut off after `write_timeout_s`: its request is then aborted like that of any client which leaves."""

    limits: ServerConfig
    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._send_away(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._expect()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect(self) -> None:
        self._arrived()
        self._arriving = self.loop.call_later(self.limits.receive_timeout_s, self._send_away, _TIMED_OUT)

    def _arrived(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _send_away(self, answer: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:  # otherwise another answer is on its way out
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()


def bounded_http(config: ServerConfig) -> type[BoundedHttp]:
    """The class for uvicorn, which makes one object of it for each connection."""
    return type("BoundedHttp", (BoundedHttp,), {"limits": config})
