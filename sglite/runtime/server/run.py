"""A server from its options to its end: bind, load the engine, serve, drain.

SIGTERM or one SIGINT: nobody new is let in, who waits is sent away with 503, who runs may finish (up to
`drain_timeout_s`). A second SIGINT ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import logging.config
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI

from sglite.errors import InvalidRequest
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.wire import bounded_http

log = logging.getLogger("sglite.server")


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    more: Sequence[APIRouter] = (),
    progress: Callable[[str], None] | None = None,
) -> None:
    """Returns when the server has drained. Raises InvalidRequest or ModelError when it cannot start."""
    config.check()
    listener = bind(config)
    configure_logging()
    tell = progress or (lambda text: print(f"sglite: {text}", file=sys.stderr, flush=True))
    engine_config = dataclasses.replace(engine_config, served_name=config.served_model_name)
    engine = Engine(
        config=engine_config,
        process=runs_in_process(engine_config, config),
        restart=config.engine_restart,
        on_progress=tell,
    )
    try:
        host, port = listener.getsockname()[:2]
        tell(f"serving {engine.model_info.name} on http://{host}:{port} (documentation: /docs)")
        run_app(create_app(engine, config, more=more), config, listener)
    finally:
        engine.close()


def runs_in_process(engine_config: EngineConfig, config: ServerConfig) -> bool:
    """On a GPU the step loop must not share the interpreter lock with HTTP; on a CPU see docs/serving.md."""
    if config.engine != "auto":
        return config.engine == "process"
    if engine_config.device == "auto":
        return Path("/dev/nvidiactl").exists()
    return engine_config.device != "cpu"


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, not listening yet: connections are refused until the model is loaded, and a port in use is
    told before it is. Raises InvalidRequest."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Taken over by every connection. Without it an answer's body waits 40 ms for the client's word on the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(f"cannot listen on {config.host}:{config.port}: {error.strerror}", param="port") from error
    return listener


def run_app(app: FastAPI, config: ServerConfig, listener: socket.socket) -> None:
    """Serve until a signal, then drain."""
    allow_connections(config.max_connections)
    GracefulServer(uvicorn_options(app, config), app).run(sockets=[listener])


def uvicorn_options(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=bounded_http(config),
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, int(config.drain_timeout_s)),
        limit_concurrency=config.max_connections,
    )


def allow_connections(count: int) -> None:
    """Raise the limit of open files, as far as the system lets us, to what so many connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512  # the engine's and the libraries' own
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == -1 else min(wanted, hard), hard))


class GracefulServer(uvicorn.Server):
    """uvicorn's, which drains by itself, with two differences that a service needs: the waiting room closes too, and a
    drained server returns in place of raising the signal again."""

    def __init__(self, options: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(options)
        self._app = app
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(130)  # now: neither answers nor the engine are waited for
        self.should_exit = True
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._app.state.service.admission.close)


def configure_logging() -> None:
    """One JSON line a request, plain lines for the rest, all on stderr."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
                "bare": {"format": "%(message)s"},
            },
            "handlers": {
                "plain": {"class": "logging.StreamHandler", "formatter": "plain"},
                "bare": {"class": "logging.StreamHandler", "formatter": "bare"},
            },
            "root": {"handlers": ["plain"], "level": "WARNING"},
            "loggers": {
                "sglite": {"level": "INFO"},
                "sglite.server.access": {"handlers": ["bare"], "propagate": False},
            },
        }
    )
