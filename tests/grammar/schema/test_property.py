"""Random small schemas: the grammar accepts exactly the values that satisfy them, and `jsonschema` agrees."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sglite.errors import GrammarError
from sglite.grammar.schema import prepare
from sglite.grammar.schema.document import Document
from sglite.grammar.schema.evaluate import Evaluator
from sglite.grammar.schema.values import parse_json
from tests.grammar.schema.byte_engine import ByteEngine

KEYS = st.sampled_from(["a", "b", "c", "ab"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 5, -1, 1.5, -0.5, "", "a", "ab", "b", 'x"y'])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
PATTERNS = st.sampled_from(["a", "^a", "b$", "^[ab]*$", "^.$", "^(?!a)"])
SMALL = st.integers(0, 3)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(inner, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        **{k: st.sampled_from([-1, 0, 0.5, 1, 2]) for k in ("minimum", "maximum", "exclusiveMinimum")},
        "multipleOf": st.sampled_from([1, 2, 5, 0.5]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), SMALL),
        "pattern": PATTERNS,
        "properties": st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2),
        "additionalProperties": inner,
        "propertyNames": st.fixed_dictionaries({"pattern": PATTERNS}),
        "required": st.lists(KEYS, min_size=1, max_size=2, unique=True),
        "items": inner,
        "prefixItems": some,
        "contains": inner,
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), some),
        **dict.fromkeys(("not", "if", "then", "else"), inner),
        "dependentRequired": st.dictionaries(KEYS, st.lists(KEYS, max_size=1), min_size=1, max_size=1),
        "dependentSchemas": st.dictionaries(KEYS, inner, min_size=1, max_size=1),
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.recursive(st.booleans() | st.fixed_dictionaries({"type": TYPES}), _schemas, max_leaves=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=4, max_size=12))
def test_the_grammar_accepts_what_validates_and_nothing_else(schema, values):
    try:
        engine = ByteEngine(prepare(json.dumps(schema)))
    except GrammarError:
        assume(False)
    oracle = Draft202012Validator(schema)
    meaning = Evaluator(Document(parse_json(json.dumps(schema))))
    for value in values:
        exact = parse_json(json.dumps(value))
        valid = meaning.is_valid(0, exact)
        assert valid == oracle.is_valid(value), (schema, value)
        assert engine.accepts(exact) == valid, (schema, value)
