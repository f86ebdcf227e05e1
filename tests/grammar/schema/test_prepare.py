"""What the schema front end enforces, refuses and reports."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sglite.errors import GrammarTooLarge, InvalidGrammar, UnsupportedSchema
from sglite.grammar.schema import prepare
from tests.grammar.schema.byte_engine import ByteEngine


def accepts(schema: Any, *values: Any) -> list[bool]:
    engine = ByteEngine(prepare(json.dumps(schema)))
    return [engine.accepts(value) for value in values]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["a", "aa"], ["aaa", ""]),
        ({"pattern": "ab"}, ["xaby", 3], ["ba"]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 1}]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[], [2, 1]], [[1, 1]]),
        (
            {
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
                "uniqueItems": True,
                "type": "array",
            },
            [[], [1], [1, "a"]],
            [["a"], [1, 1], [1, "a", 2]],
        ),
        ({"type": "number", "minimum": 4}, [4, 4.1], [3.9]),
        ({"type": "number", "minimum": -0.5, "maximum": 0.5}, [-0.4, 0], [-0.6, 0.51]),
        ({"type": "integer", "minimum": 2**63 - 1, "maximum": 2**64 + 1}, [2**63, 2**64 + 1], [2**63 - 2, 2**64 + 2]),
        (
            {"type": "array", "contains": {"type": "integer"}, "minContains": 90, "maxContains": 120},
            [[1] * 90, ["a", *[1] * 120, "b"]],
            [[], [1] * 89, ["a"] * 100, [1] * 121],
        ),
        ({"multipleOf": 0.01}, [1.25, 3], [1.255]),
        ({"enum": ["北京", 'a"b']}, ["北京", 'a"b'], ["x"]),
        ({"format": "date"}, ["2024-02-29", "0001-01-01"], ["2023-02-29", "2024-02-30", "0000-01-01", "0000-02-29"]),
        (
            {"type": "string", "format": "regex"},
            ["", "^[A-Za-z_][\\w.-]*$", "(?:a|(b{2,3}))+?", "[^\\]a-f]", "{{x}}", "a(?!b)|(?<=c)", "[ -~]{10,15}"],
            ["(", "[z-a]", "a**", "*", "a{3,2}", "[]", "\\e", ")", "(?P<n>a"],
        ),
        ({"type": "string", "format": "regex", "maxLength": 3}, ["a|b", "[a]"], ["a|bc", "[a"]),
        ({"format": "iban"}, ["anything"], []),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "x"], [3]),
        ({"not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}]),
        ({"not": {"enum": ["a", 1]}}, ["b", 2, None], ["a", 1]),
        ({"contains": {"const": 1}}, [[2, 1]], [[2], []]),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
        ({"propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}}}, [{"a": 1, "c": 2}], [{"b": 1}]),
        ({"if": {"properties": {"k": {"const": 1}}}, "then": {"required": ["a"]}}, [{"k": 2}], [{"k": 1}, {}]),
        ({"allOf": [{"maxLength": 3}, {"pattern": "^b"}]}, ["bcd"], ["abc", "bcde"]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [[], ["a"]], [[1], ["a", 1]]),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, ["a"], [1]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maxLength": 1}
            | {"definitions": {"a": {"type": "string"}}},
            ["abc"],
            [1],
        ),
    ],
)
def test_keywords_hold(schema, valid, invalid):
    assert accepts(schema, *valid) == [True] * len(valid)
    assert accepts(schema, *invalid) == [False] * len(invalid)


def test_a_key_has_one_spelling():
    engine = ByteEngine(prepare('{"properties": {"a": {"type": "integer"}}, "required": ["a"]}'))
    assert engine.accepts_text('{"a":1,"b":2}')
    assert not engine.accepts_text('{"a":1,"\\u0061":"oops"}')
    assert not engine.accepts_text('{"a":1,"a":2}')


def test_keys_come_in_the_order_of_properties():
    prepared = prepare('{"properties": {"z": {}, "a": {}}}')
    assert list(prepared.reorder({"q": 1, "a": 2, "z": 3})) == ["z", "a", "q"]
    assert not ByteEngine(prepared).accepts_text('{"a":1,"z":2}')


def test_white_space_is_none_or_single_blanks():
    schema = '{"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}'
    assert not ByteEngine(prepare(schema)).accepts_text('{"a": [1]}')
    single = ByteEngine(prepare(schema, whitespace="single"))
    assert single.accepts_text('{"a": [1, 2], "b": null}')
    assert not single.accepts_text('{"a":  [1]}')


def test_annotations_and_engine_options_never_reach_the_grammar():
    plain = prepare('{"properties": {"a": {"type": "string"}}}')
    noisy = {
        "title": 'quote " { }\n',
        "x-guidance": {"lenient": True},
        "properties": {"a": {"type": "string", "description": "%json"}},
    }
    assert prepare(json.dumps(noisy)).lark == plain.lark


def test_what_cannot_be_enforced_is_refused_with_its_pointer():
    schema = {"properties": {"a/b": {"type": "string", "format": "idn-hostname"}}}
    with pytest.raises(UnsupportedSchema) as caught:
        prepare(json.dumps(schema))
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/a~1b/format", "format")


def test_validate_masks_the_rest_and_validates_afterwards():
    strings = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {**strings, "contains": {"minLength": 1}, "minContains": 2}
    prepared = prepare(json.dumps(schema), on_unsupported="validate")
    assert not prepared.coverage.exact
    assert [i.keyword for i in prepared.coverage.items if i.status == "validated"] == ["uniqueItems"]
    assert ByteEngine(prepared).accepts_text('["a","a"]')
    assert "twice" in (prepared.validate('["a","a"]') or "")
    assert prepared.validate('["a","b"]') is None


@pytest.mark.parametrize("most", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_values_that_are_counted_and_stand_once_never_get_stuck(most, seed):
    schema = {
        "type": "array",
        "items": {"enum": ["a", "b", True, 1, 3]},
        "contains": {"type": "integer"},
        "uniqueItems": True,
        "minContains": 2,
        "minItems": 2,
        "maxItems": most,
    }
    engine, rng, text = ByteEngine(prepare(json.dumps(schema))), random.Random(seed), ""
    for _ in range(60):
        following = engine.bytes_after(text)
        if not following:
            break
        text += chr(rng.choice(following))
    assert Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize("text", ["[", "3", '{"type": "strin"}', '{"a": NaN}', '{"type": "string", "type": "null"}'])
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(InvalidGrammar):
        prepare(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"$ref": "http://example.com/x.json"}',
        '{"$ref": "#/nowhere"}',
        '{"allOf": [{"type": "null"}, {"type": "string"}]}',
    ],
)
def test_what_leads_nowhere_or_holds_nothing_is_refused(text):
    with pytest.raises(UnsupportedSchema):
        prepare(text)


def test_depth_is_limited():
    with pytest.raises(GrammarTooLarge):
        prepare('{"items":' * 500 + "{}" + "}" * 500)


def test_long_chains_of_keys_do_not_overflow_the_engine():
    names = {f"k{i}": {"type": "integer"} for i in range(1000)}
    assert accepts({"properties": names}, {"k0": 1, "k999": 2}, {"k5": "x"}) == [True, False]
    assert accepts({"properties": names, "minProperties": 2, "maxProperties": 500}, {"k1": 1, "k2": 2}, {"k1": 1}) == [
        True,
        False,
    ]


BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"allOf": [BASE], "properties": {"x": {}}}, [{"id": 1}, {"x": 1, "id": 1}], [{"id": 1, "y": 1}, {"x": 1}]),
        (
            {"type": "object", "if": {"properties": {"k": {"const": 1}}}, "then": {"properties": {"x": {}}}},
            [{}, {"k": 1, "x": 1}],
            [{"k": 2, "x": 1}, {"k": 2}, {"y": 1}],
        ),
        (
            {
                "type": "object",
                "anyOf": [
                    {"properties": {"k": {"const": name}, name: {"type": "string"}}, "required": ["k"]} for name in "ab"
                ],
            },
            [{"k": "a"}, {"k": "a", "a": ""}, {"k": "b", "b": ""}],
            [{"k": "a", "b": ""}, {"k": "b", "a": ""}, {}],
        ),
        ({"patternProperties": {"^a": {}}, "type": "object"}, [{"ab": 1}, {}], [{"b": 1}]),
    ],
)
def test_keys_that_nothing_looked_at(schema, valid, invalid):
    schema = {**schema, "unevaluatedProperties": False}
    assert all(map(Draft202012Validator(schema).is_valid, valid))
    assert accepts(schema, *valid) == [True] * len(valid)
    assert accepts(schema, *invalid) == [False] * len(invalid)


def test_items_that_nothing_looked_at():
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": {"type": "integer"}}
    assert accepts(schema, ["a"], ["a", 1, 2], ["a", "b"]) == [True, True, False]


@pytest.mark.parametrize(
    "beside",
    [
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"if": {"properties": {"a": {"const": 1}}}, "then": {}},
        {"not": {"not": {"properties": {"a": {}}}}},
    ],
)
def test_where_it_is_unknown_what_was_looked_at_that_is_said(beside):
    schema = {**beside, "unevaluatedProperties": False}
    with pytest.raises(UnsupportedSchema) as caught:
        prepare(json.dumps(schema))
    assert caught.value.pointer == "/unevaluatedProperties"


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a":{"b":1,"b" :2}}',
        '[{"a\\":":1,"a\\":":2}]',
        '{"a\\\\":1,"a\\\\":2}',
        '{"title":"\\":","\\u0061":1,"a"\n:2}',
    ],
)
def test_a_key_that_stands_twice_in_a_schema_is_told_however_it_is_written(text):
    with pytest.raises(InvalidGrammar, match="twice"):
        prepare('{"default":' + text + "}")


def test_references_with_escapes_in_them_lead_below_arrays_and_names_with_slashes():
    schema = {
        "prefixItems": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/%63"}, {"$ref": "#/prefixItems/0"}],
        "$defs": {"a/b": {"const": 1}, "c": {"const": 2}},
        "minItems": 3,
        "items": False,
        "type": "array",
    }
    assert accepts(schema, [1, 2, 1], [1, 2, 2]) == [True, False]
    for wrong in ("#/$defs/d", "#/prefixItems/3", "#/prefixItems/x/y"):
        with pytest.raises(UnsupportedSchema, match="leads nowhere"):
            prepare(json.dumps({**schema, "items": {"$ref": wrong}}))
