"""What a call tells of the calls after it, and rows that go on without a new admission."""

from __future__ import annotations

import time
from typing import Any

import sglite as sgl
from sglite.lang.outlook import outlooks
from tests.fakes.client import ScriptedClient


def nothing_held(client: ScriptedClient) -> None:
    """What a program kept is given back beside its end, not before it."""
    for _ in range(200):
        if not client.held and client.ended:
            return
        time.sleep(0.01)
    raise AssertionError(f"held: {client.held}, ended: {client.ended}")


@sgl.function
def straight(s: Any, q: str = "?") -> str:
    s += "Q: " + q + sgl.gen("a", max_tokens=5)
    s += " and " + sgl.gen("b", max_tokens=5)
    s += sgl.gen("c", max_tokens=5)
    return s["b"]


@sgl.function
def branching(s: Any) -> None:
    s += "x" + sgl.gen("plan")
    forks = s.fork(2)
    forks += sgl.gen("one")
    forks[0] += sgl.gen("two")
    forks.join()
    s += sgl.select("pick", ["a", "b"])


def test_the_longest_path_is_read_off_the_graph() -> None:
    found = {o.name: o for o in outlooks(branching.trace()).values() if o.name != "one"}
    assert (found["plan"].remaining, found["plan"].read_again, found["plan"].goes_on) == (3, True, False)
    assert (found["two"].remaining, found["two"].read_again) == (1, False)
    assert found["pick"].remaining == 0
    ones = [o for o in outlooks(branching.trace()).values() if o.name == "one"]
    assert [(o.remaining, o.goes_on) for o in ones] == [(2, True), (1, False)]


def test_a_compiled_program_sends_only_what_is_new() -> None:
    client = ScriptedClient(["first", "second", "third"])
    compiled = straight.compile(backend=client)
    state = compiled.run()
    assert client.continued == [tuple(b" and "), ()]
    assert client.prompts == ["Q: ?", "Q: ?first and ", "Q: ?first and secon"]
    assert state.ret_value == "secon"
    assert [r.program.remaining for r in client.requests if r.program] == [2, 1, 0]
    assert [r.program.wanted_again for r in client.requests if r.program] == [-1, -1, 0]
    assert [r.hold for r in client.requests] == [True, True, False]
    nothing_held(client)
    assert len(client.released) == 2


def test_compiled_and_interpreted_texts_are_the_same() -> None:
    def answer(prompt: str) -> str:
        return f"<{len(prompt)}>"

    interpreted = straight.run(backend=ScriptedClient(answer), q="hello").text()
    client = ScriptedClient(answer)
    assert straight.compile(backend=client).run(q="hello").text() == interpreted
    assert client.continued


def test_a_row_goes_on_where_a_stop_text_cut_its_end() -> None:
    client = ScriptedClient(["one. two", "x", "y"])

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("a", stop=".") + "b" + sgl.gen("b")

    state = program.compile(backend=client).run()
    assert state.text() == "aonebx"
    assert client.continued == [tuple(b"b")]
    assert [(r.continue_from is not None, r.keep) for r in client.requests] == [(False, None), (True, 4)]
    assert client.prompts == ["a", "aoneb"]
    nothing_held(client)


def test_a_row_that_is_gone_costs_a_new_request_and_nothing_else() -> None:
    class Forgetful(ScriptedClient):
        async def stream_request(self, request: Any) -> Any:
            self.held.clear()
            async for output in super().stream_request(request):
                yield output

    client = Forgetful(["first", "second", "third"])
    state = straight.compile(backend=client).run()
    assert state.text() == "Q: ?first and seconthird"
    assert client.continued == []


def test_what_is_appended_already_is_seen_without_compiling() -> None:
    client = ScriptedClient(["first", "second", "third"])

    @sgl.function
    def at_once(s: Any) -> None:
        s += "Q: " + sgl.gen("a") + " and " + sgl.gen("b") + sgl.gen("c")

    at_once.run(backend=client)
    assert client.continued == [tuple(b" and "), ()]
    nothing_held(client)


def test_a_run_that_leaves_the_graph_goes_on_step_by_step() -> None:
    client = ScriptedClient(["yes", "more", "end"])

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("a")
        if s["a"] == "yes":
            s += "b" + sgl.gen("b")
        s += "c" + sgl.gen("c")

    compiled = program.compile(backend=client)
    assert not compiled.graph.complete
    assert compiled.run().text() == "ayesbmorecend"


def test_an_agents_row_goes_on_through_what_it_reads_and_selects() -> None:
    client = ScriptedClient(["thought", "arguments", "thought", "arguments"])

    @sgl.function
    def agent(s: Any) -> None:
        s += "Q"
        for _ in range(2):
            s += "T:" + sgl.gen("thought") + "A:" + sgl.select("tool", ["x", "y"])
            s += "(" + sgl.gen("call") + ")"
            s += "saw " + s["call"].upper()

    state = agent.run(backend=client)
    assert state.text() == "QT:thoughtA:x(arguments)saw ARGUMENTST:thoughtA:x(arguments)saw ARGUMENTS"
    assert [r.continue_from is not None for r in client.requests] == [False, True, True, True]
    assert [r.continue_from is not None for r in client.score_requests] == [True, True]
    nothing_held(client)
    assert client.ended == [client.requests[0].program.program_id]


def test_a_joined_fork_keeps_nothing() -> None:
    client = ScriptedClient(delay_s=0.02)

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("plan")
        assert s["plan"]
        forks = s.fork(2)
        forks += "b" + sgl.gen("x")
        forks.join()
        s += "c" + sgl.gen("y")

    program.run(backend=client)
    leaves = [r for r in client.requests if r.program.siblings == 2]
    assert len(leaves) == 2
    nothing_held(client)
