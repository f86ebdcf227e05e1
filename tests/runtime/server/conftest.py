from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from sglite.runtime.async_engine import Engine
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from tests.fakes.core import Script, echo, scripted_engine

MakeClient = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def serve() -> AsyncIterator[MakeClient]:
    """serve(script=..., **config): a client of an app over a scripted engine (`client.engine`, `client.core`)."""
    engines: list[Engine] = []
    clients: list[httpx.AsyncClient] = []

    def make(script: Script = echo, *, step_s: float = 0.0, tokenizer: Any = None, **config: Any) -> httpx.AsyncClient:
        engine = scripted_engine(script, step_s=step_s, tokenizer=tokenizer)
        app = create_app(engine, ServerConfig(**config))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20)
        client.engine, client.core, client.app = engine, engine.core, app  # type: ignore[attr-defined]
        engines.append(engine)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()
    for engine in engines:
        engine.close()
