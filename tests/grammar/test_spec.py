from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

import pydantic
import pytest

from sglite.errors import GrammarTooLarge, InvalidGrammar
from sglite.grammar import spec


class Answer(pydantic.BaseModel):
    zeta: int
    alpha: Literal["x", "y"]


def test_key_order_is_the_schemas():
    as_dict = {"type": "object", "properties": {"z": {}, "a": {}}}
    for schema in (as_dict, json.dumps(as_dict)):
        assert list(json.loads(spec.json_schema(schema).source)["properties"]) == ["z", "a"]
    assert list(json.loads(spec.json_schema(Answer).source)["properties"]) == ["zeta", "alpha"]
    assert list(json.loads(spec.json_schema(pydantic.TypeAdapter(Answer)).source)["properties"]) == ["zeta", "alpha"]


def test_the_same_schema_is_the_same_spec():
    spaced = '{ "type" :\t"string",\n "maxLength": 3 }'
    assert spec.json_schema(spaced) == spec.json_schema({"type": "string", "maxLength": 3})
    assert hash(spec.json_schema(spaced)) == hash(spec.json_schema({"type": "string", "maxLength": 3}))


def test_text_inside_a_schema_is_kept_as_it_is():
    source = r'{"const":" a \" b\\", "minimum":1.10}'
    assert spec.json_schema(source).source == r'{"const":" a \" b\\","minimum":1.10}'
    assert spec.json_schema({"const": "\ud800"}).source == '{"const":"\\ud800"}'


def test_any_type_that_pydantic_knows_is_a_schema():
    assert json.loads(spec.json_schema(list[int]).source) == {"type": "array", "items": {"type": "integer"}}
    assert spec.json_schema(True).source == "true"


@pytest.mark.parametrize("schema", ["", "{", "[1]", "3", '"x"', '{"a":NaN}', {"a": float("nan")}, {"a": {1}}, print])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(InvalidGrammar):
        spec.json_schema(schema)


def test_nesting_and_size_are_limited():
    with pytest.raises(GrammarTooLarge):
        spec.json_schema("[" * 200_000)
    with pytest.raises(GrammarTooLarge):
        spec.json_schema('{"title":"' + "x" * (4 << 20) + '"}')
    endless: dict[str, object] = {}
    endless["not"] = endless
    with pytest.raises((GrammarTooLarge, InvalidGrammar)):
        spec.json_schema(endless)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[a", "unclosed"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bword", "lookarounds"),
        ("x{2,1}", "range"),
        ("\ud800", "surrogate"),
        (3, "text"),
        ("a" * 70_000, "characters"),
    ],
)
def test_a_regex_that_cannot_be_used_says_why(pattern, reason):
    with pytest.raises((InvalidGrammar, GrammarTooLarge), match=reason):
        spec.regex(pattern)


def test_an_open_count_starts_at_zero():
    assert spec.regex("a{,3}[{,3}]\\{,3}").source == "a{0,3}[{,3}]\\{,3}"


@pytest.mark.parametrize("choices", [[], [""], ["a", 3], "abc", ["\ud800"]])
def test_choices_that_cannot_be_used_are_refused(choices):
    with pytest.raises(InvalidGrammar):
        spec.choice(choices)


def test_choices_count_once_and_keep_their_order():
    assert json.loads(spec.choice(["b", "a", "b"]).source) == ["b", "a"]


def test_a_grammar_without_its_start_rule_is_refused():
    with pytest.raises(InvalidGrammar, match="root"):
        spec.ebnf('rout ::= "x"')
    with pytest.raises(InvalidGrammar):
        spec.lark('begin: "x"')
    with pytest.raises(InvalidGrammar):
        spec.structural_tag({"type": "structural_tag"})


def test_specs_are_made_without_torch():
    script = "import sys, sglite.grammar.compiler, sglite.grammar.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
