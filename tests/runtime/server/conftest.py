from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from sglite.runtime.async_engine import Engine
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.run import bind, uvicorn_options
from tests.fakes.core import Script, ScriptedCore, echo, scripted_engine

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


class Live:
    """A server on a real socket, on a thread."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.app = create_app(engine, config)
        self.core: ScriptedCore = getattr(engine, "core", None)  # type: ignore[assignment]
        listener = bind(dataclasses.replace(config, port=0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn_options(self.app, dataclasses.replace(config, drain_timeout_s=1)))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    """live(script=..., **config): the same on a socket, for clients that bring their own HTTP."""
    servers: list[Live] = []

    def start(script: Script = echo, *, step_s: float = 0.0, **config: Any) -> Live:
        servers.append(Live(scripted_engine(script, step_s=step_s), ServerConfig(**config)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
        server.engine.close()
