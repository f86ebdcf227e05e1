from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

import sglite
from sglite.errors import InvalidRequest
from sglite.runtime.server.auth import PUBLIC_PATHS
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.routes import system
from tests.runtime.server.conftest import MakeClient

KEY, OTHER, ADMIN = "key-of-alice", "key-of-bobby", "admin-secret"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ADMIN_ROUTES = {"/flush_cache"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_but_health_needs_a_key(serve: MakeClient) -> None:
    client = serve(api_keys=(KEY,))
    seen = 0
    for route in _all_routes(client.app.routes):  # type: ignore[attr-defined]
        path = re.sub(r"\{.*?\}", "x", route.path)
        for method in route.methods or ():
            for headers in ({}, bearer("wrong-key"), bearer(""), {"authorization": KEY}, {"x-api-key": "wrong"}):
                response = await client.request(method, path, headers=headers)
                assert (response.status_code == 401) == (path not in PUBLIC_PATHS), f"{method} {path}"
            seen += 1
    assert seen > 20
    assert (await client.get("/nowhere")).status_code == 401
    for headers in (bearer(KEY), {"x-api-key": KEY}):
        assert (await client.post("/v1/chat/completions", json=HELLO, headers=headers)).status_code == 200


async def test_admin_routes_need_the_admin_key(serve: MakeClient) -> None:
    client = serve(api_keys=(KEY,), admin_key=ADMIN)
    for path in ADMIN_ROUTES:
        assert (await client.post(path, headers=bearer(KEY))).status_code == 403
        assert (await client.post(path, headers=bearer(ADMIN))).status_code == 200
    assert (await serve(api_keys=(KEY,)).post("/flush_cache", headers=bearer(KEY))).status_code == 403
    assert (await serve().post("/flush_cache")).status_code == 200


def test_the_admin_routes_are_those_of_this_test() -> None:
    marked = {
        route.path
        for route in system.router.routes
        if isinstance(route, APIRoute) and any(d.name == "admin" for d in route.dependant.dependencies)
    }
    assert marked == ADMIN_ROUTES


async def test_tenants_share_no_cache_namespace_and_cannot_abort_each_other(serve: MakeClient) -> None:
    client = serve(api_keys=(KEY, OTHER))
    for key in (KEY, OTHER, KEY):
        await client.post("/v1/chat/completions", json=HELLO, headers={**bearer(key), "x-request-id": "same"})
    first, second, third = client.core.requests  # type: ignore[attr-defined]
    assert first.namespace == third.namespace != second.namespace
    assert first.request_id != second.request_id
    assert KEY not in first.namespace


def test_a_public_address_needs_a_key() -> None:
    with pytest.raises(InvalidRequest, match="without an API key"):
        ServerConfig(host="0.0.0.0").check()
    ServerConfig(host="0.0.0.0", api_keys=(KEY,)).check()
    ServerConfig(host="0.0.0.0", insecure=True).check()
    ServerConfig(host="::1").check()
    with pytest.raises(InvalidRequest, match="8 characters"):
        ServerConfig(api_keys=("short",)).check()


async def test_a_body_that_is_too_large_is_cut_off(serve: MakeClient) -> None:
    client = serve()
    big = b'{"messages": [{"role": "user", "content": "' + b"x" * 5_000_000 + b'"}]}'
    headers = {"content-type": "application/json"}
    assert (await client.post("/v1/chat/completions", content=big, headers=headers)).status_code == 413

    async def chunks():  # no content-length
        for i in range(0, len(big), 100_000):
            yield big[i : i + 100_000]

    response = await client.post("/v1/chat/completions", content=chunks(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1,2",
        b"nul",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe",
        b'"x"',
        b'{"n": 1e999}',
    ],
)
async def test_what_is_no_request_gets_400(serve: MakeClient, body: bytes) -> None:
    client = serve()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/tokenize"):
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (400, 422), path
        assert response.json()["error"]["message"]


async def test_an_error_of_the_inside_stays_inside(serve: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object, index: int) -> str:
        raise ZeroDivisionError("secret detail")

    client = serve(broken)
    response = await client.post("/v1/chat/completions", json=HELLO)
    assert response.status_code in (500, 503)
    client.app.state.service.turns = None  # type: ignore[attr-defined]
    response = await client.post("/v1/chat/completions", json=HELLO)
    assert response.status_code == 500
    assert "NoneType" not in response.text
    assert "NoneType" in caplog.text


async def test_request_ids_come_back_and_one_line_is_logged(
    serve: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(lambda request, index: "hello")
    with caplog.at_level(logging.INFO, logger="sglite.server.access"):
        given = await client.post("/v1/chat/completions", json=HELLO, headers={"x-request-id": "abc-1"})
        made = await client.post("/v1/chat/completions", json=HELLO, headers={"x-request-id": "bad id\x01"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "chatcmpl-abc-1"
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    line = json.loads(caplog.records[0].message)
    assert line["request_id"] == "abc-1"
    assert line["status"] == 200
    assert line["completion_tokens"] == 5
    assert line["finish_reasons"] == ["stop"]
    assert line["first_token_ms"] <= line["total_ms"]


async def test_browsers_of_other_origins_get_nothing(serve: MakeClient) -> None:
    closed = await serve().post("/v1/chat/completions", json=HELLO, headers={"origin": "http://evil"})
    assert "access-control-allow-origin" not in closed.headers
    client = serve(cors_origins=("http://mine",))
    opened = await client.post("/v1/chat/completions", json=HELLO, headers={"origin": "http://mine"})
    assert opened.headers["access-control-allow-origin"] == "http://mine"
    text = await serve().post("/v1/chat/completions", content=json.dumps(HELLO), headers={"content-type": "text/plain"})
    assert text.status_code == 400


def test_nothing_unpickles_and_no_socket_listens_to_the_world() -> None:
    for file in Path(sglite.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for word in (
            "import pickle",
            "recv_pyobj",
            "send_pyobj",
            "torch.load(",
            "tcp://",
            "marshal.loads",
            "yaml.load(",
        ):
            assert word not in text, f"{word} in {file}"


async def test_facts_about_the_server_hold_no_secret(serve: MakeClient) -> None:
    client = serve(api_keys=(KEY,), admin_key=ADMIN)
    response: httpx.Response = await client.get("/get_server_info", headers=bearer(ADMIN))
    assert KEY not in response.text
    assert ADMIN not in response.text


def _all_routes(routes: Iterable[Any]) -> Iterator[Any]:
    """Those of included routers too, however this version of the framework keeps them."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is not None:
            yield from _all_routes(inner)
        else:
            yield route
