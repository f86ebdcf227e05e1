"""Where the workloads run, and in which ways: on an Engine in reach, or against a server of its own process.

    EngineStand   programs, calls              one Engine in this process (its step loop on a thread, or in a process)
    ServerStand   programs, text, ids          one server on a loopback port (served.py): programs through a
                                               RuntimeEndpoint, calls over HTTP as text and as token ids (loose.py)

Each run begins with an empty cache, and gives what the engine was asked for meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import httpx
import msgspec

from sglite.bench.programs.loose import EngineCalls, IdCalls, Loose, TextCalls, Wire
from sglite.bench.programs.record import Call, Recorder, Warmed
from sglite.bench.programs.served import RECORD, Trace
from sglite.bench.programs.workloads import Arguments, Workload
from sglite.errors import BackendError
from sglite.lang.backends.sglite_server import RuntimeEndpoint
from sglite.lang.bridge import program_loop
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.text.types import TextTokenizer

Way = Literal["programs", "calls", "text", "ids"]
WAYS: tuple[Way, ...] = ("programs", "calls")
SERVER_WAYS: tuple[Way, ...] = ("programs", "text", "ids")
CLOSE_S = 20.0  # a server has for its end
SERVED = (sys.executable, "-m", "sglite.bench.programs.served")
COUNTED = (
    "steps",
    "step_s",
    "admissions",
    "resumptions",
    "retractions",
    "computed_tokens",
    "evicted_pages",
    "schedule_s",
    "forward_s",
    "mask_s",
    "sample_s",
    "wait_s",
    "apply_s",
    "device_s",
    "server_s",
)


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    calls: list[Call]
    warmed: list[Warmed]
    counts: dict[str, float]


class Stand(Protocol):
    ways: tuple[Way, ...]
    tokenizer: TextTokenizer
    capacity: int  # of the KV memory, in tokens

    def run_once(self, load: Workload, arguments: list[Arguments], way: Way, at_once: int) -> Measured: ...


class EngineStand:
    """Satisfies `Stand`."""

    ways: tuple[Way, ...] = WAYS

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer: TextTokenizer = engine.tokenizer
        self.capacity: int = engine.facts["num_pages"] * engine.facts["page_size"]

    def run_once(self, load: Workload, arguments: list[Arguments], way: Way, at_once: int) -> Measured:
        loop = program_loop()
        loop.run(self.engine.flush_cache())
        recorder = Recorder(self.engine)
        before = self.engine.stats()
        began = time.perf_counter()
        if way == "programs":
            _programs(recorder, load, arguments, at_once)
        else:
            loop.run(_calls(lambda program: EngineCalls(recorder, program), load, arguments, at_once))
        seconds = time.perf_counter() - began
        return Measured(seconds, recorder.calls, recorder.warmed, _gained(before, self.engine.stats()))


class ServerStand:
    """Satisfies `Stand`. Both clients are made once, and keep their connections."""

    ways: tuple[Way, ...] = SERVER_WAYS

    def __init__(self, url: str) -> None:
        self._endpoint = RuntimeEndpoint(url)
        assert self._endpoint.tokenizer is not None
        self.tokenizer: TextTokenizer = self._endpoint.tokenizer
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits)
        self._wire = Wire(self._http, self.tokenizer)
        self.capacity = self._taken().capacity

    def run_once(self, load: Workload, arguments: list[Arguments], way: Way, at_once: int) -> Measured:
        loop = program_loop()
        loop.run(self._endpoint.flush_cache())
        before, cpu = self._taken(), time.process_time()
        began = time.perf_counter()
        if way == "programs":
            _programs(self._endpoint, load, arguments, at_once)
        else:
            kind: Any = TextCalls if way == "text" else IdCalls
            loop.run(_calls(lambda program: kind(self._wire, program), load, arguments, at_once))
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        after = self._taken()
        return Measured(seconds, after.calls, after.warmed, {**_gained(before.stats, after.stats), "client_s": cpu})

    def close(self) -> None:
        """The connections."""
        self._endpoint.close()
        program_loop().run(self._http.aclose())

    def _taken(self) -> Trace:
        return program_loop().run(self._record())

    async def _record(self) -> Trace:
        try:
            answer = await self._http.post(RECORD)
        except httpx.HTTPError as error:
            raise BackendError(f"the server of the bench does not answer: {error or type(error).__name__}") from error
        return msgspec.msgpack.decode(answer.content, type=Trace)


@contextmanager
def server(config: EngineConfig, *, command: Sequence[str] = SERVED, where: str = "auto") -> Iterator[ServerStand]:
    """A server process until the end of the block, or of this process. Raises BackendError where it does not start."""
    options = json.dumps({"engine": asdict(config), "where": where})
    process = subprocess.Popen([*command, options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise BackendError("the server of the bench ended before it was ready")
        _await_listening(url)
        stand = ServerStand(url)
        try:
            yield stand
        finally:
            stand.close()
    finally:
        process.stdin.close()  # it ends by itself then
        process.stdout.close()
        try:
            process.wait(CLOSE_S)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


def _await_listening(url: str) -> None:
    for _ in range(100):
        try:
            httpx.get(url + "/health/ready", timeout=10.0)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise BackendError(f"the server of the bench does not listen at {url}")


def _programs(client: Any, load: Workload, arguments: list[Arguments], at_once: int) -> None:
    load.program.compile(backend=client).run_batch(arguments, num_threads=at_once)


async def _calls(start: Callable[[str], Loose], load: Workload, arguments: list[Arguments], at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with places:
            await load.calls(start(str(number)), **arguments[number])

    works: list[Coroutine[Any, Any, None]] = [one(number) for number in range(len(arguments))]
    await asyncio.gather(*works)


def _gained(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in COUNTED if name in after}
