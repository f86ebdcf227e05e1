"""A server for one bench, in a process of its own: `sglite serve`'s application, and a Recorder before its engine.

    python -m sglite.bench.programs.served OPTIONS

OPTIONS is JSON: {"engine": fields of EngineConfig}. The process prints its URL as its first line of stdout
when requests can come. It ends on a signal, as `sglite serve` does, and when its stdin is closed: whatever
happens to the process that started it, no server is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from sglite import serve_programs
from sglite.bench.programs.record import Call, Recorder, Warmed
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.deps import AdminDep
from sglite.runtime.server.run import bind, configure_logging, run_app, runs_in_process, uvicorn_options

RECORD = "/bench/record"


@dataclass(frozen=True)
class Trace:
    """What the engine was asked for since the last time that somebody looked, and its counters so far."""

    calls: list[Call] = field(default_factory=list)
    warmed: list[Warmed] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)  # "server_s": CPU seconds of its process
    capacity: int = 0  # of its KV memory, in tokens


def serve(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Until a signal, or the end of stdin."""
    listener = bind(config)
    configure_logging()
    with Engine(config=engine_config, process=runs_in_process(engine_config, config)) as engine:
        threading.Thread(target=end_with_stdin, name="sglite-stdin", daemon=True).start()
        print(_url(listener), flush=True)
        run_app(_app(Recorder(engine), config), config, listener)


@contextmanager
def in_thread(recorder: Recorder, config: ServerConfig) -> Iterator[str]:
    """The same application on a thread of this process, for tests; gives its URL."""
    listener = bind(config)
    server = uvicorn.Server(uvicorn_options(_app(recorder, config), config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield _url(listener)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def _url(listener: socket.socket) -> str:
    return "http://{}:{}".format(*listener.getsockname()[:2])


def _app(recorder: Recorder, config: ServerConfig) -> FastAPI:
    return create_app(recorder, config, more=[serve_programs.router, _router(recorder)])


def _router(recorder: Recorder) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.post(RECORD)
    async def record(admin: AdminDep) -> Response:
        found = await recorder.stats_async()
        stats = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        calls, warmed = recorder.taken()
        stats["server_s"] = time.process_time()
        trace = Trace(calls, warmed, stats, recorder.facts["num_pages"] * recorder.facts["page_size"])
        return Response(msgspec.msgpack.encode(trace), media_type="application/msgpack")

    return router


def end_with_stdin() -> None:
    """Waits for its end, and ends this process as a service manager would."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> None:
    given = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    engine = EngineConfig(**given["engine"])
    # Of a bench everything may wait: what is measured is the server, not how it sends clients away.
    serve(engine, ServerConfig(port=0, log_requests=False, max_waiting=100_000, max_waiting_tokens=10**9,
                               engine=given.get("where", "auto")))  # fmt: skip


if __name__ == "__main__":
    main()
