"""Constraint arguments and what becomes of the text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

import sglite as sgl
from sglite.errors import GrammarError, IncompleteOutput, ProgramError
from sglite.lang import schema as schemas
from tests.fakes.client import ScriptedClient


class Color(Enum):
    red = "red"
    blue = "blue"


class Inner(BaseModel):
    color: Color


class Outer(BaseModel):
    inner: Inner
    many: list[Inner]
    maybe: Inner | None
    open: dict[str, int]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


@dataclass
class Point:
    x: int
    y: int


def value_of(answer: str, **constraint: Any) -> Any:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", **constraint)

    state = program.run(backend=ScriptedClient([answer]))
    assert state.raw("x") == answer
    assert state.text() == "a" + answer
    return state["x"]


@pytest.mark.parametrize(
    ("schema", "answer", "value"),
    [
        (Inner, '{"color":"red"}', Inner(color=Color.red)),
        (TypeAdapter(list[int]), "[1,2]", [1, 2]),
        (list[Color], '["blue"]', [Color.blue]),
        (Literal["a", "b"], '"b"', "b"),
        (bool, "true", True),
        (Point, '{"x":1,"y":2}', Point(1, 2)),
        ({"type": "array"}, "[3]", [3]),
        ('{"type": "string"}', '"s"', "s"),
    ],
)
def test_schema_gives_objects(schema: Any, answer: str, value: Any) -> None:
    assert value_of(answer, schema=schema) == value


def test_everything_else_gives_text() -> None:
    assert value_of('{"a":1}', json_schema='{"type":"object"}') == '{"a":1}'
    assert value_of('{"a":1}', json_schema={"type": "object"}) == '{"a":1}'
    assert value_of("12", regex="[0-9]+") == "12"
    assert value_of("12", dtype=int) == "12"
    assert value_of("1.5", dtype="float") == "1.5"
    assert value_of("True", dtype=bool) == "True"
    assert value_of('"with, a \\"comma\\""', dtype=str) == '"with, a \\"comma\\""'


def test_a_number_ends_at_the_blank_that_models_write_after_it() -> None:
    client = ScriptedClient(["42 "])

    @sgl.function
    def program(s: Any) -> None:
        s += "n=" + sgl.gen_int("n") + ";" + sgl.gen_string("s")

    state = program.run(backend=client)
    assert state["n"] == "42"
    assert state.text().startswith("n=42;")
    assert client.requests[0].sampling_params.stop == (" ", "\n")


@pytest.mark.parametrize("text", ['""', '"a b"', '"日本"', '"\\n\\u00e9"', '"comma, [x]"'])
def test_a_string_is_any_json_string(text: str) -> None:
    assert re.fullmatch(schemas.STRING, text)
    json.loads(text)


def test_types_are_closed_and_schemas_are_left_alone() -> None:
    closed = schemas.closed(TypeAdapter(Outer).json_schema())
    assert closed["additionalProperties"] is False
    assert closed["$defs"]["Inner"]["additionalProperties"] is False
    assert closed["properties"]["open"]["additionalProperties"] == {"type": "integer"}
    assert schemas.closed(TypeAdapter(Open).json_schema())["additionalProperties"] is True
    given = {"type": "object", "properties": {"a": {}}}
    made = schemas.constraint("schema", given, whitespace="compact", on_unsupported="error")
    assert json.loads(made.spec.source) == given


def test_a_type_without_a_schema_is_refused_at_the_call() -> None:
    with pytest.raises(GrammarError, match="no JSON schema"):
        sgl.gen("x", schema=re.Match)


@pytest.mark.parametrize("argument", ["schema", "json_schema"])
def test_what_is_no_schema_is_told_what_one_is(argument: str) -> None:
    for wrong in (3, [1], object()):
        with pytest.raises(GrammarError, match="a schema is a pydantic model or another type, .* of type"):
            sgl.gen("x", **{argument: wrong})
    with pytest.raises(GrammarError, match="schema is a text but not JSON"):
        sgl.gen("x", **{argument: "a name"})


def test_a_value_cut_by_the_limit_is_an_error_that_says_so() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", schema=Inner, max_tokens=5)

    with pytest.raises(ProgramError, match="limit of 5 tokens before the value was complete; raise max_tokens") as got:
        program.run(backend=ScriptedClient(['{"color":"red"}']))
    assert isinstance(got.value.__cause__, IncompleteOutput)
    assert (got.value.__cause__.status, got.value.__cause__.param) == (422, "max_tokens")
