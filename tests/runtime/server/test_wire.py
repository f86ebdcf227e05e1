"""Clients that hold a connection and do not talk, talk without end, or do not listen."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.run import bind
from tests.runtime.server.conftest import Live

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(server: Live, *, buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(10)
    at = urlsplit(server.url)
    made.connect((at.hostname, at.port))
    return made


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1", HEAD, HEAD + b"content-length: 50\r\n\r\n{"], ids=["nothing", "line", "head", "body"]
)
def test_a_request_that_does_not_arrive_is_sent_away(live: Callable[..., Live], sent: bytes) -> None:
    server = live(receive_timeout_s=0.3)
    with connect(server) as connection:
        connection.sendall(sent)
        begun = time.monotonic()
        answer = read_all(connection)
        assert 0.2 < time.monotonic() - begun < 5
    assert answer == b"" or b" 408 " in answer
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_a_head_without_end_is_cut_off(live: Callable[..., Live]) -> None:
    server = live(max_header_bytes=20_000)
    with connect(server) as connection:
        connection.sendall(HEAD)
        answer = b""
        try:
            for _ in range(100):
                connection.sendall(b"x-a: " + b"a" * 5_000 + b"\r\n")
                time.sleep(0.005)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        else:
            answer = read_all(connection)
    assert answer == b"" or b" 431 " in answer
    long = {"x-a": "a" * 8_000}
    assert httpx.get(f"{server.url}/health/ready", headers=long).status_code == 200


def test_a_client_that_stops_reading_is_cut_off_and_its_request_ends(live: Callable[..., Live]) -> None:
    server = live(lambda request, index: "x" * 100_000, write_timeout_s=0.5)
    body = b'{"prompt": "a", "stream": true, "max_tokens": 100000}'
    with connect(server, buffer=4096) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        end = time.monotonic() + 20
        admission = server.app.state.service.admission
        while not server.core.requests or server.core.num_running or admission.running:
            assert time.monotonic() < end, "a reader that takes nothing keeps its place"
            time.sleep(0.02)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_a_slow_but_steady_reader_gets_everything(live: Callable[..., Live]) -> None:
    server = live(lambda request, index: "x" * 3_000, write_timeout_s=1.0)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3_000}
    ) as response:
        seen = 0
        for line in response.iter_lines():
            seen += '"text":"x"' in line
            if seen % 500 == 0:
                time.sleep(0.2)
    assert seen == 3_000


def test_more_connections_than_allowed_are_told_so(live: Callable[..., Live]) -> None:
    server = live(max_connections=5)
    idle = [connect(server) for _ in range(6)]
    try:
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
    finally:
        for connection in idle:
            connection.close()
    end = time.monotonic() + 5
    while httpx.get(f"{server.url}/health/ready").status_code != 200:
        assert time.monotonic() < end


def test_requests_sent_at_once_are_answered_in_order(live: Callable[..., Live]) -> None:
    server = live()
    bodies = [b'{"prompt": "%d", "max_tokens": 1}' % i for i in range(5)]
    with connect(server) as connection:
        connection.sendall(b"".join(HEAD + b"content-length: %d\r\n\r\n" % len(b) + b for b in bodies[:-1]))
        last = bodies[-1]
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(last) + last)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    at = [answer.index(b'"text":"%d"' % i) for i in range(5)]
    assert at == sorted(at)


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    listener = bind(ServerConfig(port=0))
    try:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        listener.close()
