"""The connections of links: kept, opened again when they were closed, and what is no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from sglite.errors import BackendError, InvalidRequest
from sglite.lang.backends.http import Http, Unreachable
from sglite.lang.backends.wire import reaches

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncGenerator[tuple[Http, list[bytes]]]:
    """`answer` is called for each request; gives a client and the heads that came."""
    heads: list[bytes] = []

    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                heads.append(head + await reader.readexactly(size))
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    http = Http(f"http://127.0.0.1:{port}/under", api_key="secret-key", timeout_s=5.0)
    yield http, heads
    http.close()
    listening.close()
    for writer in writers:
        writer.close()
    await asyncio.sleep(0.02)


async def test_a_connection_is_used_again_and_pieces_come_as_they_are_sent() -> None:
    ports: set[int] = set()
    seen = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.add(writer.get_extra_info("peername")[1])
        writer.write(OK + b"3\r\nabc\r\n")
        await asyncio.wait_for(seen.wait(), 5)
        writer.write(b"2\r\nde\r\n0\r\n\r\n")

    pieces: list[bytes] = []

    def fed(data: bytes) -> None:
        pieces.append(data)
        seen.set()

    async with server(answer) as (http, heads):
        for _ in range(3):
            await http.pour("/calls", b"body", fed)
    assert pieces == [b"abc", b"de"] * 3
    assert len(ports) == 1
    assert heads[0].startswith(b"POST /under/calls HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"authorization: Bearer secret-key\r\n" in heads[0]
    assert heads[0].endswith(b"\r\n\r\nbody")


async def test_a_connection_that_the_server_closed_meanwhile_is_opened_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"1\r\na\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()  # without having said so

    pieces: list[bytes] = []
    async with server(answer) as (http, _):
        for _ in range(3):
            await http.pour("/calls", b"", pieces.append)
            await asyncio.sleep(0.01)
    assert pieces == [b"a"] * 3


async def test_an_answer_that_breaks_off_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"5\r\nab")
        await writer.drain()
        writer.close()

    pieces: list[bytes] = []
    async with server(answer) as (http, heads):
        with pytest.raises(Unreachable, match="does not answer: the connection was closed"):
            await http.pour("/calls", b"", pieces.append)
    assert len(heads) == 1


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        (b"SSH-2.0-OpenSSH\r\n", BackendError, "no HTTP"),
        (
            b'HTTP/1.1 400 No\r\ncontent-length: 52\r\n\r\n{"error": {"message": "so not", "param": "calls"   }}',
            BackendError,
            "so not",
        ),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", BackendError, "502"),
    ],
)
async def test_what_is_no_good_answer_is_an_error(said: bytes, error: type[Exception], match: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)

    async with server(answer) as (http, _):
        with pytest.raises(error, match=match):
            await http.pour("/calls", b"", lambda data: None)


async def test_an_error_of_the_reader_ends_the_request() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"1\r\na\r\n")

    def fed(data: bytes) -> None:
        raise InvalidRequest("not that")

    async with server(answer) as (http, _):
        with pytest.raises(InvalidRequest, match="not that"):
            await http.pour("/calls", b"", fed)


async def test_silence_and_nobody_are_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1)

    async with server(answer) as (http, _):
        http._timeout = httpx.Timeout(0.05)
        with pytest.raises(Unreachable, match="nothing came for too long"):
            await http.pour("/calls", b"", lambda data: None)
    with pytest.raises(Unreachable, match="no connection"):
        await Http("http://127.0.0.1:9", api_key=None, timeout_s=1.0).pour("/calls", b"", lambda data: None)


def test_a_proxy_is_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy:3128", "no": "inside"})
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: host == "inside")
    assert not reaches(httpx.URL("http://outside:1"))
    assert reaches(httpx.URL("http://inside:1"))
    assert reaches(httpx.URL("https://outside:1"))
    assert not reaches(httpx.URL("https://name:word@outside:1"))
