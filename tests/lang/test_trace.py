"""What is known of a program before it runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

import sglite as sgl
from sglite.errors import GrammarError, InvalidRequest, UnsupportedSchema
from sglite.protocol import Coverage, GrammarSpec, ProgramGraph
from tests.fakes.client import ScriptedClient


class Person(BaseModel):
    name: str
    age: int


def ops(graph: ProgramGraph) -> list[str]:
    return [node.op for node in graph.nodes]


def test_a_straight_program_is_known_whole() -> None:
    @sgl.function
    def program(s: Any, topic: str, style: str = "short") -> None:
        s += "Write about " + topic + ".\n"
        s += sgl.gen("draft", max_tokens=7)
        forks = s.fork(2)
        forks += lambda i: f"View {i}: "
        forks += sgl.gen("view", schema=Person)
        forks.join()
        for view in s["view"]:
            s += view
        s += sgl.select("verdict", ["good", "bad"])

    graph = program.trace()
    assert graph.complete
    assert graph.exact
    assert graph.arguments == ("topic",)
    expected = "text argument text gen fork text text gen gen join variable variable select"
    assert ops(graph) == expected.split()
    assert [n.branch for n in graph.nodes if n.op == "gen"] == [0, 1, 2]
    assert [n.source for n in graph.nodes if n.op == "variable"] == [7, 8]
    assert graph.nodes[7].grammar is not None
    text = str(graph)
    assert "program program(topic)" in text
    assert "gen draft max_tokens=7" in text
    assert "select verdict of 'good', 'bad'" in text
    assert msgspec.json.decode(msgspec.json.encode(graph), type=ProgramGraph) == graph


def test_the_trace_ends_where_the_program_looks_at_a_value() -> None:
    @sgl.function
    def program(s: Any, q: str) -> None:
        s += q + sgl.gen("tool", choices=["a", "b"])
        if s["tool"] == "a":
            s += sgl.gen("x")

    graph = program.trace(q="hi")
    assert not graph.complete
    assert "variable 'tool'" in graph.stopped
    assert ops(graph) == ["text", "select"]
    assert "depends on data" in str(graph)


@pytest.mark.parametrize("use", [bool, len, int, list, lambda v: v.strip(), lambda v: v[0], lambda v: "a" in v, hash])
def test_every_look_is_noticed(use: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("x")
        use(s["x"])
        s += "never"

    assert not program.trace().complete


def test_f_strings_carry_placeholders_but_string_methods_on_them_are_noticed() -> None:
    @sgl.function
    def fine(s: Any, q: str) -> None:
        s += f"Q: {q}\n" + sgl.gen("a")
        s += f"so {s['a']}!"

    graph = fine.trace()
    assert ops(graph) == ["text", "argument", "text", "gen", "text", "variable", "text"]
    assert graph.nodes[4].text == "so "
    assert not graph.exact

    @sgl.function
    def stripped(s: Any) -> None:
        s += sgl.gen("a")
        s += f"{s['a']}".strip()

    assert not stripped.trace().complete


def test_steps_are_those_of_a_run() -> None:
    client = ScriptedClient(["x"])

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("p") + "b"
        s.fork(1)
        s += sgl.gen("q", max_tokens=4)
        s += sgl.gen("r", schema=Person)

    steps = {node.name: node.step for node in program.trace().nodes if node.op == "gen"}
    assert steps == {"p": 1, "q": 4, "r": 5}
    client = ScriptedClient(["x", "y", sgl.GrammarTimeout("z")])
    with pytest.raises(sgl.ProgramError) as caught:
        program.run(backend=client)
    assert caught.value.step == steps["r"]


def test_an_error_of_the_program_on_real_arguments_is_its_own() -> None:
    @sgl.function
    def program(s: Any, n: int) -> None:
        s += "x" * n

    assert not program.trace().complete
    with pytest.raises(TypeError):
        program.trace(n="no number")
    with pytest.raises(sgl.ProgramSyntaxError, match="no parameter 'm'"):
        program.trace(m=1)


def test_a_program_called_by_another_does_not_run() -> None:
    client = ScriptedClient()

    @sgl.function
    def inner(s: Any) -> None:
        s += sgl.gen("x")

    @sgl.function
    def outer(s: Any) -> None:
        s += inner.run(backend=client)["x"]

    assert "call of program inner" in outer.trace().stopped
    assert client.requests == []


def test_async_programs_are_traced_too() -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        s += await s.get_async("x")

    assert ops(program.trace()) == ["text", "gen", "variable"]


class TestCompile:
    def test_constraints_are_compiled_and_the_static_prefix_is_warm(self) -> None:
        client = ScriptedClient()

        @sgl.function
        def program(s: Any, q: str) -> None:
            s += "A long introduction with many words in it, " * 3
            s += q + sgl.gen("p", schema=Person) + sgl.gen("r", regex="[0-9]+") + sgl.gen("again", schema=Person)

        compiled = program.compile(backend=client)
        assert [spec.kind for spec in client.compiled] == ["json_schema", "regex"]
        assert set(compiled.coverage) == {"p", "r", "again"}
        assert compiled.prefix_tokens == len(client.warmed[0])
        state = compiled.run("x")
        assert client.requests[0].prompt[: compiled.prefix_tokens] == client.warmed[0]
        assert isinstance(state["p"], Person)
        assert len(compiled.run_batch([("a",), ("b",)])) == 2
        assert program.cache(backend=client) == compiled.prefix_tokens

    def test_roles_belong_to_the_prefix(self) -> None:
        client = ScriptedClient()

        @sgl.function
        def program(s: Any, q: str) -> None:
            s += sgl.system("Be brief and be kind to everybody.")
            s += sgl.user("Tell me something: " + q)
            s += sgl.assistant(sgl.gen("a"))

        program.compile(backend=client)
        text = client.text_of(client.warmed[0])
        assert text.startswith("<system>Be brief and be kind to everybody.</system>\n<user>Tell me")

    def test_what_cannot_be_enforced_is_refused_before_anything_runs(self) -> None:
        class Refusing(ScriptedClient):
            async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
                raise UnsupportedSchema("no", pointer="/x", keyword="x")

        client = Refusing()

        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("p", schema={"type": "object"})

        with pytest.raises(GrammarError, match="/x"):
            program.compile(backend=client)
        assert client.requests == []

    def test_bad_parameters_are_refused(self) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += sgl.gen("p", top_p=3)

        with pytest.raises(InvalidRequest, match="top_p"):
            program.compile(backend=ScriptedClient())
