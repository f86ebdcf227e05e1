"""The connections of a remote backend."""

from __future__ import annotations

import asyncio

from sglite.lang.backends.http import Http


async def test_a_request_under_way_leaves_no_connection_open_behind_a_close() -> None:
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert await reader.read() == b""
        writer.close()
        over.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        http = Http(f"http://127.0.0.1:{port}", api_key=None, timeout_s=5)
        request = asyncio.create_task(http.delete("/programs/p"))
        await asyncio.sleep(0.03)
        http.close()
        await request
        await asyncio.wait_for(over.wait(), 2)
