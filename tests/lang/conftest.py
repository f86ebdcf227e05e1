from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn


class Served:
    """An ASGI app on a real socket, on a thread."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """serve(app) -> the URL of the app on a socket."""
    served: list[Served] = []

    def start(app: Any) -> str:
        served.append(Served(app))
        return served[-1].url

    yield start
    for each in served:
        each.stop()
