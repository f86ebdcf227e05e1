"""What a mask lets through validates, whatever is sampled. tests/bench/round_trip.py walks real schemas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.round_trip import check
from tests.grammar.helpers import PERSON
from tests.grammar.residual.test_matcher import KEYS

SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "anything": {},
    "open": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "one of": {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]},
    "not": {"not": {"type": ["string", "number"]}},
    "if": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["size"]},
        "else": {"not": {"required": ["size"]}},
    },
    "numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}, "minItems": 3},
    "texts": {"type": "array", "items": {"anyOf": [{"format": "date"}, {"pattern": "^a+b?$", "maxLength": 5}]}},
    "contains": {"type": "array", "contains": {"const": 1}, "maxContains": 2, "items": {"type": "integer"}},
    "names": {"propertyNames": {"pattern": "^[a-c]{2}$"}, "type": "object", "minProperties": 2, "maxProperties": 4},
    "dependent": {"dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {"type": "null"}}, "type": "object"},
    "tree": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}, "maxProperties": 2},
    **{f"kept apart: {name}": schema for name, schema in KEYS.items()},
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("seed", range(2))
def test_what_is_sampled_is_valid(bpe_compiler, name, seed):
    assert check(bpe_compiler, SCHEMAS[name], seed=seed, most=40) == "valid"
