"""HTTP/1.1 for links: bytes are posted, and the bytes of the answer are handed on as they come.

A program's step may cost one request, and httpx takes 2 to 3 ms for one where a step of an engine takes 4. What is here
writes a head and hands an answer to httptools, in a tenth of that. Connections are kept alive and used again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.request
from collections.abc import Callable
from typing import cast

import httptools
import httpx

from sglite.errors import BackendError, SgliteError

_MAX_IDLE = 256  # connections

Fed = Callable[[bytes], None]


class Broken(Exception):
    """The connection failed or broke. `fresh`: it had not been used before, or something had come of this answer."""

    def __init__(self, message: str, *, fresh: bool = True) -> None:
        super().__init__(message)
        self.fresh = fresh


class Wires:
    """The connections of one event loop to one server."""

    def __init__(
        self, url: httpx.URL, headers: dict[str, str], *, verify: ssl.SSLContext | str | bool, timeout: httpx.Timeout
    ) -> None:
        """`verify` and `timeout` as httpx takes them."""
        self._url = url
        lines = [
            f"host: {url.netloc.decode()}",
            "accept: */*",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._head = "\r\n".join(lines).encode()
        self._tls = httpx.create_ssl_context(verify=verify) if url.scheme == "https" else None
        self._timeout = timeout
        self._idle: list[_Wire] = []

    async def post(self, path: str, body: bytes, fed: Fed) -> httpx.Response:
        """The answer; of one with status 200 the body has gone to `fed`, piece by piece. Raises Broken, and what `fed`
        raises."""
        target = self._url.raw_path.rstrip(b"/") + path.encode()
        head = b"POST %b HTTP/1.1\r\n%b\r\ncontent-type: application/msgpack\r\ncontent-length: %d\r\n\r\n"
        data = head % (target, self._head, len(body)) + body
        while True:
            wire = self._idle.pop() if self._idle else await self._connected()
            try:
                answer = await wire.ask(data, fed, self._timeout.read or 600.0)
            except Broken as error:
                if error.fresh:
                    raise
                continue  # a server closes connections that rest; another one that rests may be closed, too
            if wire.usable and len(self._idle) < _MAX_IDLE:
                self._idle.append(wire)
            else:
                wire.close()
            return answer

    def close(self) -> None:
        """Those that rest."""
        while self._idle:
            self._idle.pop().close()

    async def _connected(self) -> _Wire:
        port = self._url.port or (443 if self._tls is not None else 80)
        try:
            async with asyncio.timeout(self._timeout.connect):
                _, wire = await asyncio.get_running_loop().create_connection(
                    _Wire, self._url.host, port, ssl=self._tls, happy_eyeballs_delay=0.25
                )
        except TimeoutError as error:
            raise Broken("no connection in time") from error
        except OSError as error:
            raise Broken(f"no connection: {error}") from error
        return wire


class _Wire(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._asked = 0
        self._heard = 0.0  # when something came last, time.monotonic() seconds
        self._done: asyncio.Future[None] | None = None
        self._fed: Fed = _nowhere
        self._headers: list[tuple[bytes, bytes]] = []
        self._content = bytearray()
        self._began = False
        self.usable = True

    async def ask(self, data: bytes, fed: Fed, timeout_s: float) -> httpx.Response:
        loop = asyncio.get_running_loop()
        self._asked += 1
        self._fed, self._done = fed, loop.create_future()
        self._headers, self._content, self._began = [], bytearray(), False
        self._heard = time.monotonic()
        if self._transport is None or self._transport.is_closing():
            raise self._broken("the connection was closed")
        self._timer = loop.call_later(timeout_s, self._watch, timeout_s)
        self._transport.write(data)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._timer.cancel()
            self._fed, self._done = _nowhere, None
        return httpx.Response(self._parser.get_status_code(), headers=self._headers, content=bytes(self._content))

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _watch(self, timeout_s: float) -> None:
        """Looks again where something has come meanwhile."""
        left = self._heard + timeout_s - time.monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._watch, timeout_s)
        else:
            self._fail(Broken("nothing came for too long"))

    def _broken(self, message: str) -> Broken:
        return Broken(message, fresh=self._asked == 1 or self._began)

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # -- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard, self._began = time.monotonic(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(BackendError("the backend's answer is no HTTP"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(self._broken(f"the connection broke: {exc}" if exc else "the connection was closed"))

    # -- httptools'

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._content += body
            return
        try:
            self._fed(body)
        except SgliteError as error:  # what is raised here would get lost in the parser
            self._fail(error)

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _nowhere(data: bytes) -> None:
    pass


def reaches(url: httpx.URL) -> bool:
    """Whether Wires can speak to it: not through a proxy, and with no name and password in the URL."""
    proxies = urllib.request.getproxies()
    proxied = proxies.get(url.scheme) or proxies.get("all")
    return not url.userinfo and (not proxied or bool(urllib.request.proxy_bypass(url.host)))
