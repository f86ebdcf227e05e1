"""Objects of which some key must break a rule, or that need several undeclared keys, where only few names will do."""

from __future__ import annotations

import json
import random
from itertools import combinations, product
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sglite.errors import UnsupportedSchema
from sglite.grammar.schema import prepare
from sglite.grammar.schema.emptiness import some_texts
from sglite.grammar.schema.openness import others_are_open
from tests.grammar.schema.byte_engine import ByteEngine

FEW: dict[str, Any] = {"patternProperties": {"^[a-c]$": True}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "three of few": {**FEW, "minProperties": 3},
    "some of few asked for": {**FEW, "required": ["a"], "dependentRequired": {"a": ["b"]}, "minProperties": 2},
    "one name": {"not": {"propertyNames": {"not": {"const": "b"}}}},
    "one of each": {
        "allOf": [{"not": {"propertyNames": {"not": {"enum": [name, "1"]}}}} for name in ("a", "b")],
        "minProperties": 2,
    },
    "few patterns": {**FEW, "not": {"patternProperties": {"^(a|b)$": {"type": "integer"}}}, "maxProperties": 2},
    "any other": {"not": {"patternProperties": {"b": False}, "additionalProperties": {"type": "integer"}}},
    "a name with": {"not": {"propertyNames": {"not": {"pattern": "b"}}}, "propertyNames": {"not": {"const": "c"}}},
    "a name without": {"not": {"propertyNames": {"pattern": "b"}, "additionalProperties": {"type": "integer"}}},
    "all but some": {"patternProperties": {"b": False}, "minProperties": 3},
}
KEYS = ("a", "b", "c", "ab", "1")


def _objects(rng: random.Random) -> list[dict[str, Any]]:
    found = [dict(zip(keys, values, strict=True)) for n in range(3) for keys in combinations(KEYS, n) for values in
             product((1, "x"), repeat=n)]  # fmt: skip
    more = [dict.fromkeys(keys, rng.choice([1, "x"])) for n in (3, 4, 5) for keys in combinations(KEYS, n)]
    return found + more


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_exactly_the_valid_objects_are_accepted(name):
    schema = {"type": "object", **SCHEMAS[name]}
    engine, oracle = ByteEngine(prepare(json.dumps(schema))), Draft202012Validator(schema)
    for value in _objects(random.Random(1)):
        assert engine.accepts(value) == oracle.is_valid(value), value


def test_names_that_could_all_be_taken_are_refused():
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]b?$"},
        "not": {"additionalProperties": {"type": "string"}},
    }
    with pytest.raises(UnsupportedSchema) as caught:
        prepare(json.dumps(schema))
    assert caught.value.keyword == "not"


def test_all_texts_of_a_terminal_are_found_or_said_to_be_more():
    assert some_texts("/(a|b|ab)/", 3) == (b"a", b"ab", b"b")
    assert some_texts("/a4d/ & ~/a4d/", 0) == ()
    assert len(some_texts("/[0-9]*/", 5) or ()) == 6


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("b", True), ("^ab?c", True), ("(a|b)$", True), ("^.{2}$", False), ("[^a]", False), ("a*", False)],
)
def test_strings_without_a_pattern_go_on_by_characters_that_it_does_not_know(pattern, expected):
    assert others_are_open(pattern) == expected
