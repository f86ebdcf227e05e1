"""Calls that are sent before the one that they go on from has ended: which are, and that no text depends on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import sglite as sgl
from sglite.errors import BackendError, ProgramError
from sglite.protocol import GenerateRequest, RequestOutput, ScoreOutput, ScoreRequest
from tests.fakes.client import ScriptedClient


class Following(ScriptedClient):
    """Lets requests wait for the one that they continue, as an engine does. `sent`: ids in the order in which they
    came, with a mark where they came before that one's end."""

    takes_followers = True

    def __init__(self, *args: Any, early: bool = True, delay_s: float = 0.03, **options: Any) -> None:
        super().__init__(*args, delay_s=delay_s, **options)
        self.takes_followers = early
        self.sent: list[str] = []
        self.used: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        end = self._ends[request.request_id] = asyncio.Event()
        try:
            await self._led(request)
            async for output in super().stream_request(request):
                yield output
        finally:
            end.set()

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        await self._led(request)
        return await super().score_request(request)

    async def _led(self, request: GenerateRequest | ScoreRequest) -> None:
        end = None if request.continue_from is None else self._ends.get(request.continue_from)
        place = request.request_id.rpartition("-")[2]
        self.sent.append(place + ("<" if end is not None and not end.is_set() else ""))
        if end is not None:
            await end.wait()
        self.used.append(place)


def answered(prompt: str) -> str:
    return f" <{len(prompt)}>"


@pytest.fixture(params=[True, False], ids=["early", "in turn"])
def client(request: pytest.FixtureRequest) -> Iterator[Following]:
    client = Following(answered, early=request.param)
    yield client
    assert not client.held, "every row is given back"


@sgl.function
def chat(s: Any) -> None:
    with s.user():
        s += "Hello"
    s += sgl.assistant(sgl.gen("first"))
    s += sgl.user("And a longer question, which is tokenised before it is needed, as texts of that length are.")
    s += sgl.assistant("So: " + sgl.gen("second"))
    s += " one of " + sgl.select("chosen", ["a", "b", "c"])


@sgl.function
def tree(s: Any) -> None:
    s += "Root" + sgl.gen("plan")
    for i, fork in enumerate(s.fork(3)):
        fork += f" branch {i}" + sgl.gen("thought")
        for j, leaf in enumerate(fork.fork(2)):
            leaf += f" leaf {j}" + sgl.gen("leaf")
    s += " end" + sgl.gen("end")


def expected(program: Any) -> tuple[str, list[str]]:
    client = Following(answered, early=False)
    text = program.run(backend=client).text()
    return text, sorted(client.prompts)


@pytest.mark.parametrize("compiled", [True, False])
def test_chats_and_their_selects_are_sent_early_with_the_text_of_calls_in_turn(
    client: Following, compiled: bool
) -> None:
    program = chat.compile(backend=client) if compiled else chat
    state = program.run() if compiled else program.run(backend=client)
    text, prompts = expected(chat)
    assert (state.text(), sorted(client.prompts)) == (text, prompts)
    assert client.sent == (["0.1", "0.2<", "0.3<"] if client.takes_followers else ["0.1", "0.2", "0.3"])


@pytest.mark.parametrize("compiled", [True, False])
def test_forks_are_sent_early_and_go_on_from_the_row_of_their_parent(client: Following, compiled: bool) -> None:
    state = tree.compile(backend=client).run() if compiled else tree.run(backend=client)
    text, prompts = expected(tree)
    assert (state.text(), sorted(client.prompts)) == (text, prompts)
    if client.takes_followers:
        assert sorted(client.sent[1:5]) == ["0.2<", "1.1<", "2.1<", "3.1<"]
        assert sum(one.endswith("<") for one in client.sent) == len(client.sent) - 1
        forks = [r for r in client.requests if r.request_id.endswith(".1") and r.program and r.program.siblings == 3]
        assert len(forks) == 3


def test_what_a_program_reads_first_is_not_sent_early() -> None:
    client = Following(answered)

    @sgl.function
    def reading(s: Any) -> None:
        s += "Q" + sgl.gen("a")
        if s["a"]:
            s += " again" + sgl.gen("b")

    reading.run(backend=client)
    assert client.sent == ["0.1", "0.2"]


def test_a_cut_answer_gives_the_early_call_up_and_the_call_is_made_anew() -> None:
    def program(client: Following) -> str:
        @sgl.function
        def cut(s: Any) -> None:
            s += "Q:" + sgl.gen("a", stop="\n") + "|" + sgl.gen("b")

        return cut.run(backend=client).text()

    in_turn, early = (Following(["one\ntwo", "three"], early=e) for e in (False, True))
    assert program(early) == program(in_turn) == "Q:one|three"
    assert early.sent == ["0.1", "0.2<", "0.2e"]
    assert early.prompts[-1] == in_turn.prompts[-1]


def test_a_stream_is_not_sent_early() -> None:
    client = Following(answered)
    state = chat.run(backend=client, stream=True)
    assert "".join(state.text_iter()) == expected(chat)[0]
    assert not any(one.endswith("<") for one in client.sent)


def test_an_error_of_the_leader_is_the_programs_error() -> None:
    client = Following([BackendError("no more"), "x", "y"])
    with pytest.raises(ProgramError, match="no more"):
        chat.run(backend=client)


def test_what_was_sent_early_and_is_not_wanted_any_more_is_given_up() -> None:
    client = Following(answered, delay_s=5.0)

    @sgl.function
    def stopped(s: Any) -> None:
        s += "Q" + sgl.gen("a") + " more" + sgl.gen("b")
        while "0.2<" not in client.sent:
            time.sleep(0.002)
        raise ValueError("enough")

    with pytest.raises(ProgramError, match="enough"):
        stopped.run(backend=client)
    while client.running:
        time.sleep(0.002)
    assert client.used == ["0.1"], "the second never began"


def test_what_cannot_be_asked_is_refused_at_its_turn_and_nothing_is_said_of_it_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += "x" + sgl.gen("a") + sgl.gen("b", min_tokens=9)
        return s["a"]

    with pytest.raises(ProgramError, match="variable 'b'.*min_tokens"):
        program.run(backend=Following(answered), max_new_tokens=5)
    assert not caplog.records


def test_a_fork_that_is_stopped_gives_up_the_call_that_was_sent_for_it() -> None:
    client = Following(answered, delay_s=0.15)

    @sgl.function
    def program(s: Any) -> int:
        s += "x" + sgl.gen("a")
        fork = s.fork(1)[0]
        fork += " goes on" + sgl.gen("b")
        while len(client.sent) < 2:
            time.sleep(0.001)
        fork.cancel()
        s += " and on" + sgl.gen("c")
        assert s["c"]
        return len(client.used)

    assert program.run(backend=client).ret_value == 2


def ran(client: Following, *runs: tuple[int, str]) -> list[str]:
    """The texts of a program that reads its plan before it forks, and what was sent in the last run."""

    @sgl.function
    def program(s: Any, points: int, ending: str) -> None:
        s += "Q" + sgl.gen("plan")
        assert s["plan"]
        forks = s.fork(points)
        for i, fork in enumerate(forks):
            fork += f" point {i}:" + sgl.gen("text")
        forks.join()
        s += ending + "".join(s["text"]) + sgl.gen("end")

    texts = []
    for points, ending in runs:
        client.sent.clear()
        texts.append(program.run(points=points, ending=ending, backend=client).text())
    return texts


def test_what_a_program_did_behind_an_answer_before_is_sent_while_it_is_read() -> None:
    client, in_turn = Following(answered, delay_s=0.06), Following(answered, early=False, delay_s=0.001)
    runs = [(3, f"end {i}") for i in range(3)]
    assert ran(client, *runs) == ran(in_turn, *runs)
    assert client.sent == ["0.1", "1.1g<", "2.1g<", "3.1g<", "0.2"], "the texts behind the forks are never the same"
    assert sorted(client.prompts) == sorted(in_turn.prompts)
    assert not client.held


def test_a_program_that_does_something_else_this_time_has_the_text_of_calls_in_turn() -> None:
    client, in_turn = Following(answered, delay_s=0.06), Following(answered, early=False, delay_s=0.001)
    runs = [(3, "end"), (3, "end"), (2, "end")]
    assert ran(client, *runs) == ran(in_turn, *runs)
    assert client.sent == ["0.1", "1.1g<", "2.1g<", "3.1g<", "0.2"], "the third is given up"
    assert not client.held


def test_a_guessed_call_is_taken_only_where_it_is_the_same_call() -> None:
    @sgl.function
    def program(s: Any, size: int) -> None:
        s += "Q" + sgl.gen("a")
        if s["a"]:
            s += " again" + sgl.gen("b", max_tokens=size)
        if s["b"]:
            s += " one of " + sgl.select("c", ["x", "y"])

    client = Following(answered)
    for size in (4, 4, 4, 5):
        client.sent.clear()
        program.run(size=size, backend=client)
        if size == 4 and client.sent[1].endswith("<"):
            assert client.sent == ["0.1", "0.2g<", "0.3g<"]
    assert client.sent[:3] == ["0.1", "0.2g<", "0.2e"], "the prompt is the same, its limit is not"
    assert [r.sampling_params.max_tokens for r in client.requests if r.request_id.endswith("0.2e")] == [5]
    assert not client.held


def test_a_program_that_ends_gives_up_what_it_was_guessed_to_do() -> None:
    @sgl.function
    def program(s: Any, goes_on: bool) -> None:
        s += "Q" + sgl.gen("a")
        if s["a"] and goes_on:
            s += " again" + sgl.gen("b")

    client = Following(answered)
    texts = [program.run(goes_on=goes_on, backend=client).text() for goes_on in (True, True, False)]
    assert texts[2] == "Q <1>"
    assert client.sent[-2:] == ["0.1", "0.2g<"]
    while client.running:
        time.sleep(0.002)
    assert not client.held
