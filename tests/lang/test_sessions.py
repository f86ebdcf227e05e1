"""A remote program whose state lies on the server: deltas over the wire, broken connections, expiry, the same text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import sglite as sgl
from sglite.lang.backends.http import Http, Unreachable
from sglite.lang.backends.sglite_server import RuntimeEndpoint
from sglite.protocol import CallAnswer
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.sessions import ProgramSessions
from tests.fakes.tiny_folder import tiny_folder

Serve = Callable[[Any], str]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("tiny"))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_pages": 4000, "max_rows": 16}
    with sgl.Engine(model=str(folder), num_threads=1, check_invariants=True, **options) as made:
        yield made


@pytest.fixture
def app(engine: sgl.Engine) -> Any:
    return create_app(engine, ServerConfig())


@pytest.fixture
def backend(engine: sgl.Engine, app: Any, serve: Serve) -> Iterator[RuntimeEndpoint]:
    made = RuntimeEndpoint(serve(app), tokenizer=engine.tokenizer)
    yield made
    eventually(
        lambda: not len(app.state.service.program_sessions)
    )  # ends are told beside what the program goes on with
    made.close()


@sgl.function
def agent(s: Any, turns: int = 3) -> None:
    s += "The quick brown fox jumps over the lazy dog. " * 4
    for turn in range(turns):
        s += f"\nThought {turn}:" + sgl.gen("thought", max_tokens=8, temperature=0, stop=["the", "a "])
        s += "\nTool:" + sgl.select("tool", [" red", " green", " red blue"])
        s += "(" + sgl.gen("call", regex="[a-z]{2,6}", max_tokens=12, temperature=0) + ")"
        s += "\nSaw: " + s["call"].upper()
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"\nEnd {i}:" + sgl.gen("end", max_tokens=5, temperature=0, ignore_eos=True)
    forks.join()
    s += "\n" + "|".join(s["end"]) + sgl.gen("last", max_tokens=4, temperature=0, ignore_eos=True)


def sent(bodies: list[Any]) -> list[tuple[bool, int]]:
    """(named an earlier call, prompt tokens) of each call that went over the wire."""
    calls = [call for body in bodies for call in msgspec.msgpack.decode(body).get("calls", ())]
    return [(c.get("base") is not None, len((c.get("generate") or c["score"])["prompt"])) for c in calls]


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    pour = Http.pour

    def watched(self: Http, path: str, body: bytes, fed: Any, *, closing: bool = False) -> Any:
        found.append(body)
        return pour(self, path, body, fed, closing=closing)

    monkeypatch.setattr(Http, "pour", watched)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_same_and_only_what_is_new_is_sent(
    engine: sgl.Engine, app: Any, backend: Any, bodies: list[Any], stream: bool
) -> None:
    before = engine.stats()
    remote = agent.run(backend=backend, stream=stream)
    text, ends = remote.text(), remote["end"]
    after = engine.stats()
    local = agent.run(backend=engine)
    assert (text, ends) == (local.text(), local["end"])
    first, *others = sent(bodies)
    assert not first[0] and first[1] > 40
    assert all(named and tokens < 45 for named, tokens in others), others
    assert after["resumptions"] - before["resumptions"] >= 8  # rows went on, there too


def test_a_choice_may_follow_a_generation_with_nothing_between(engine: sgl.Engine, backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "The quick" + sgl.gen("a", max_tokens=4, temperature=0, ignore_eos=True)
        s += sgl.select("b", ["yes", "no"]) + sgl.select("c", ["red", "blue"])

    assert program.run(backend=backend).text() == program.run(backend=engine).text()


def test_a_broken_connection_costs_nothing(
    engine: sgl.Engine, app: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pour, breaks = Http.pour, [0]

    async def fragile(self: Http, path: str, body: bytes, fed: Any, *, closing: bool = False) -> None:
        count = 0

        def breaking(data: bytes) -> None:
            nonlocal count
            count += 1
            fed(data)
            if count == 2 and breaks[0] < 5:
                breaks[0] += 1
                raise Unreachable("the cable is out")

        await pour(self, path, body, breaking, closing=closing)

    monkeypatch.setattr(Http, "pour", fragile)
    before = engine.stats()["requests"]
    remote = agent.run(backend=backend, stream=True)
    text = remote.text()
    assert breaks[0] == 5
    assert engine.stats()["requests"] - before == 3 * 3 + 4  # no call was made twice
    assert text == agent.run(backend=engine).text()


def test_a_server_that_was_started_anew_gets_the_whole_prompt(engine: sgl.Engine, app: Any, backend: Any) -> None:

    @sgl.function
    def program(s: Any) -> None:
        s += "The quick brown fox" + sgl.gen("a", max_tokens=5, temperature=0, ignore_eos=True)
        assert s["a"] is not None
        app.state.service.program_sessions._sessions.clear()
        s += " and" + sgl.gen("b", max_tokens=5, temperature=0, ignore_eos=True)

    assert program.run(backend=backend).text() == program.run(backend=engine).text()


def test_a_session_is_over_with_its_program_or_when_nobody_asks(engine: sgl.Engine, app: Any, backend: Any) -> None:
    sessions: ProgramSessions = app.state.service.program_sessions
    before = engine.stats()["held"]
    agent.run(backend=backend, turns=1)
    eventually(lambda: not len(sessions) and engine.stats()["held"] == before)
    sessions.expires_s = 0.2

    @sgl.function
    def program(s: Any) -> None:
        s += "The quick" + sgl.gen("a", max_tokens=5, temperature=0, ignore_eos=True)
        assert s["a"] is not None
        assert len(sessions) == 1
        eventually(lambda: not len(sessions))
        eventually(lambda: engine.stats()["held"] == before)

    program.run(backend=backend)


def test_a_program_that_is_given_up_runs_no_further_there(engine: sgl.Engine, app: Any, backend: Any) -> None:

    @sgl.function
    def program(s: Any) -> None:
        s += "The quick" + sgl.gen("a", max_tokens=3000, temperature=0, ignore_eos=True)

    state = program.run(backend=backend, stream=True)
    next(iter(state.text_iter()))
    state.cancel()
    eventually(lambda: not engine.stats()["running"])


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\x81\xa5calls\x01", b"\x81\xa1x\x90", b"\x91" * 100_000, b'{"calls": []}']
)
async def test_what_is_no_frame_is_refused(app: Any, body: bytes) -> None:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/programs/calls", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


P = {"program_id": "p"}


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"generate": None},
        {"generate": {"request_id": "a", "prompt": [1]}},
        {"score": {"request_id": "a", "prompt": "text", "continuations": [[1]], "program": P}},
        {"score": {"request_id": "a/b", "prompt": [1], "continuations": [[1]], "program": P}},
        {"score": {"request_id": "a", "prompt": [1], "continuations": [[1]], "program": {"program_id": "a/b"}}},
        {"score": {"request_id": "a", "prompt": [1], "continuations": [[1]], "program": P}, "after": 3},
        {"score": {"request_id": "a", "prompt": [1], "continuations": [[1]], "program": P}, "base": "b", "keep": 2},
        {"score": {"request_id": "a", "prompt": [1], "continuations": [[1]], "program": P}, "base": "b", "keep": -1},
        {"score": {"request_id": "a", "prompt": [99999], "continuations": [[1]], "program": P}},
        {"score": {"request_id": "a", "prompt": [-1], "continuations": [[1]], "program": P}},
        {"generate": {"request_id": "a", "prompt": [1], "sampling_params": {"n": 1000}, "program": P}},
        {"generate": {"request_id": "a", "prompt": [1], "sampling_params": {"temperature": -1}, "program": P}},
        {"generate": {"request_id": "a", "prompt": [1], "grammar": {"kind": "regex", "source": "["}, "program": P}},
    ],
)
async def test_a_wrong_call_is_refused_by_itself(app: Any, call: dict[str, Any]) -> None:
    good = {"generate": {"request_id": "good", "prompt": [1], "sampling_params": {"max_tokens": 1}, "program": P}}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        refused, answered = await asked(client, [call, good])
        assert refused.error is not None
        assert refused.error["status"] == 400
        assert refused.error["message"]
        assert answered.generated is not None
        await asked(client, [], ended=["p", "unknown"], given_up=[("unknown", "x")])


async def test_tenants_do_not_meet(engine: sgl.Engine) -> None:
    keys = ("first-key", "second-key")
    app = create_app(engine, ServerConfig(api_keys=keys))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    two_tokens = {"sampling_params": {"max_tokens": 2}, "stream": False, "program": P}
    call = {"generate": {"request_id": "a", "prompt": [1, 2, 3], "hold": True, **two_tokens}}
    more = {"generate": {"request_id": "b", "prompt": [4], **two_tokens}, "base": "a", "keep": 3}
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/programs/calls", content=msgspec.msgpack.encode({}))).status_code == 401
        one, two = ({"authorization": f"Bearer {key}"} for key in keys)
        (answer,) = await asked(client, [call], headers=one)
        assert answer.generated is not None
        (answer,) = await asked(client, [more], headers=two)
        assert answer.error is not None
        assert (answer.error["status"], answer.error["param"]) == (400, "base")
        (answer,) = await asked(client, [more], headers=one)
        assert answer.generated is not None
        for headers in (one, two):
            await asked(client, [], ended=["p"], headers=headers)


async def asked(
    client: httpx.AsyncClient, calls: list[Any], *, headers: dict[str, str] | None = None, **more: Any
) -> list[CallAnswer]:
    """The last answer to each call."""
    body = msgspec.msgpack.encode({"calls": calls, **more})
    answer = await client.post("/programs/calls", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[int, CallAnswer] = {}
    data = answer.content
    while data:
        size = 4 + int.from_bytes(data[:4], "little")
        for each in msgspec.msgpack.decode(data[4:size], type=list[CallAnswer]):
            found[each.call] = each
        data = data[size:]
    return [each for _, each in sorted(found.items())]


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it did not become true")
