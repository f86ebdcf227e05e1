"""A static program's graph is run beside a remote engine: same text, same values; what cannot be sent is not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, Field

import sglite as sgl
from sglite import serve_programs
from sglite.lang.backends.http import Http
from sglite.lang.backends.sglite_server import RuntimeEndpoint
from sglite.protocol import GenerateRequest, ProgramRef, RequestOutput
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from tests.fakes.tiny_folder import tiny_folder
from tests.lang.conftest import Served


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("tiny"))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_pages": 4000, "max_rows": 16}
    with sgl.Engine(model=str(folder), num_threads=1, check_invariants=True, **options) as made:
        yield made


@pytest.fixture(scope="module")
def backend(engine: sgl.Engine) -> Iterator[RuntimeEndpoint]:
    app = create_app(engine, ServerConfig(), more=[serve_programs.router])
    served = Served(app)
    endpoint = RuntimeEndpoint(served.url, tokenizer=engine.tokenizer)
    yield endpoint
    for _ in range(200):  # ends are told beside what a program goes on with
        if not len(app.state.service.program_sessions):
            break
        time.sleep(0.02)
    endpoint.close()
    time.sleep(0.1)  # its connections close on their own loop
    served.stop()


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where requests with streamed answers went."""
    found: list[str] = []
    events = Http.events

    def watched(self: Http, path: str, body: Any) -> Any:
        found.append(path.split("/")[-1])
        return events(self, path, body)

    monkeypatch.setattr(Http, "events", watched)
    return found


class Scores(BaseModel):
    clarity: int = Field(ge=1, le=5)
    words: list[str] = Field(max_length=2)


def gen(name: str, tokens: int = 6, **options: Any) -> Any:
    return sgl.gen(name, max_tokens=tokens, temperature=0, **options)


@sgl.function
def everything(s: Any, topic: str) -> str:
    s += sgl.system("You judge.")
    s += sgl.user("Here is " + topic if isinstance(topic, str) else "Here is " + topic)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += sgl.user(f"Question {i}?")
        with fork.assistant():
            fork += gen("opinion", ignore_eos=True) + " so " + sgl.select("verdict", ["good", "bad", "goodish"])
    forks.join()
    with s.user():
        s += "Opinions: "
        for opinion in (fork["opinion"] for fork in forks):
            s += opinion
            s += ", "
    with s.assistant():
        with s.var_scope("all"):
            s += "Scores: " + sgl.gen(
                "scores", json_schema=json.dumps(Scores.model_json_schema()), max_tokens=60, temperature=0
            )
        s += " " + gen("end", stop=["e"])
    return s["end"]


@sgl.function
def doubled(s: Any, a: str, b: str) -> None:
    s += "The quick " + a + gen("x", ignore_eos=True)
    copies = s.fork(2)
    copies += b
    copies += gen("y", 4, ignore_eos=True)
    copies.join("concate_and_append")
    s += gen("z", 3, ignore_eos=True)


@pytest.mark.parametrize(
    ("program", "arguments", "names"),
    [
        (everything, {"topic": "the brown fox"}, ("opinion", "verdict", "scores", "all", "end")),
        (doubled, {"a": "brown fox", "b": " jumps"}, ("x", "z")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_graph_runs_there_and_the_program_is_as_always(
    engine: sgl.Engine, backend: Any, paths: list[str], program: Any, arguments: Any, names: Any, stream: bool
) -> None:
    compiled = program.compile(backend=backend)
    assert compiled.graph.complete and compiled.graph.exact
    paths.clear()
    remote = compiled.run(**arguments, stream=stream)
    local = program.run(**arguments, backend=engine)
    assert remote.text() == local.text()
    assert [remote[name] for name in names] == [local[name] for name in names]
    assert remote.messages() == local.messages()
    assert remote.ret_value == local.ret_value
    assert paths == ["run"]  # one request for all of it
    assert remote.usage.completion_tokens == local.usage.completion_tokens
    for _ in range(100):
        if not engine.stats()["held"]:
            break
        time.sleep(0.02)
    assert not engine.stats()["held"]


def test_a_batch_runs_there_too(engine: sgl.Engine, backend: Any, paths: list[str]) -> None:
    compiled = doubled.compile(backend=backend)
    arguments = [{"a": f"fox {i}", "b": " and"} for i in range(4)]
    paths.clear()
    remote = [state.text() for state in compiled.run_batch(arguments)]
    assert paths == ["run"] * 4
    assert remote == [state.text() for state in doubled.run_batch(arguments, backend=engine)]


def test_what_the_graph_does_not_hold_goes_step_by_step(engine: sgl.Engine, backend: Any, paths: list[str]) -> None:
    @sgl.function
    def looks(s: Any, a: str) -> None:
        s += "The " + a + gen("x", ignore_eos=True)
        s += "long" if len(s["x"]) > 3 else "short"
        s += gen("y", ignore_eos=True)

    @sgl.function
    def spells(s: Any, a: str) -> None:
        s += f"The {a}" + gen("x", ignore_eos=True)

    for program in (looks, spells):
        compiled = program.compile(backend=backend)
        paths.clear()
        assert compiled.run(a="fox").text() == program.run(a="fox", backend=engine).text()
        assert "run" not in paths


def test_options_of_a_run_are_not_in_its_graph(engine: sgl.Engine, backend: Any, paths: list[str]) -> None:
    compiled = doubled.compile(backend=backend)
    paths.clear()
    assert compiled.run(a="x", b="y", seed=3).text() == doubled.run(a="x", b="y", backend=engine, seed=3).text()
    assert "run" not in paths


@pytest.mark.parametrize("finished", [True, False], ids=["behind an answer", "in the middle of one"])
def test_a_run_that_breaks_off_goes_on_step_by_step(
    engine: sgl.Engine, backend: Any, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    run_graph = RuntimeEndpoint.run_graph

    async def breaks(self: Any, run: Any) -> Any:
        count = 0
        async for answer in run_graph(self, run):
            yield answer
            count += 1
            if answer.generated is not None and answer.generated.finished == finished:
                raise sgl.BackendError("gone")

    monkeypatch.setattr(RuntimeEndpoint, "run_graph", breaks)
    compiled = doubled.compile(backend=backend)
    assert compiled.run(a="x", b="y").text() == doubled.run(a="x", b="y", backend=engine).text()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"graph": {"name": "p", "nodes": [], "complete": false}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "argument", "name": "a"}], "arguments": ["a"]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "variable", "name": "a", "source": 7}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "text", "text": "x", "branch": 4}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "reasoning", "name": "a"}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "select", "choices": ["a"], "method": "mine"}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "gen", "params": {"n": 100}}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "role_end", "name": "user"}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "scope_end", "name": "x"}]}}',
        b'{"graph": {"name": "p", "nodes": [{"op": "argument", "name": "a"}]}}',
    ],
)
async def test_a_graph_that_is_none_is_refused(engine: sgl.Engine, body: bytes) -> None:
    app = create_app(engine, ServerConfig(), more=[serve_programs.router])
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/programs/run", content=body)
        assert answer.status_code == 400, answer.text


async def test_a_run_of_too_many_states_makes_none_of_them(engine: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(serve_programs.Branch, "fork", lambda _, count: made.append(count))
    app = create_app(engine, ServerConfig(), more=[serve_programs.router])
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    node = {"op": "fork", "children": [1] * 200_000}
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/programs/run", json={"graph": {"name": "p", "nodes": [node]}})
        assert "at most 1000 states in one run" in answer.text
    assert not made


async def test_a_run_that_is_given_up_releases_its_rows_after_its_calls_were_aborted() -> None:
    told: list[str] = []

    async def outputs(request: Any, call: Any, *, rid: str) -> AsyncGenerator[RequestOutput, None]:
        try:
            await asyncio.Event().wait()
        finally:
            told.append(f"abort {rid}")
        yield RequestOutput(request_id=rid)

    async def say(text: str) -> None:
        told.append(text)

    tenant = SimpleNamespace(owned=lambda name: name)
    engine = SimpleNamespace(
        model_info=None, release=lambda row: say(f"release {row}"), end_program=lambda name: say(f"end {name}")
    )
    service = SimpleNamespace(tokenizer=None, engine=engine, outputs=outputs, config=ServerConfig())
    client = serve_programs._ServiceClient(service, SimpleNamespace(tenant=tenant), asyncio.Queue())  # type: ignore[arg-type]
    request = GenerateRequest(request_id="p-0.1", prompt=(1,), hold=True, program=ProgramRef(program_id="p"))
    stream = client.stream_request(request)
    call = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    call.cancel()
    await client.end_program("p")
    assert told == ["abort p-0.1", "release p-0.1", "end p"]


@pytest.mark.parametrize("path", ["/programs/run", "/programs/calls", "/generate"])
async def test_a_client_that_leaves_while_its_body_is_read_is_no_error(
    engine: sgl.Engine, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(engine, ServerConfig(), more=[serve_programs.router])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send)
    assert not caplog.records
