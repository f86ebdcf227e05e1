"""Inputs made to hurt: each is exact or refused, within its limits, and others go on meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglite.errors import GrammarError, GrammarTimeout
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec
from tests.fakes.bpe import bpe_tokenizer
from tests.grammar.helpers import whole

LIMIT_SECONDS = 2.0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def object_of(count: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"key{n}": schema for n in range(count)}}


SCHEMAS: dict[str, Any] = {
    "10,000 strings": {"enum": [f"option {n}" for n in range(10_000)]},
    "10,000 numbers": {"enum": list(range(0, 30_000, 3))},
    "500 deep": nested(500),
    "a megabyte": object_of(9_000, {"type": "string", "description": "x" * 60}),
    "maxLength 1e9": {"type": "string", "maxLength": 10**9},
    "minLength 1e9": {"type": "string", "minLength": 10**9},
    "maxItems 1e9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    "minItems 1e6": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "beyond 64 bits": {"type": "integer", "minimum": -(10**40), "maximum": 10**40 + 7},
    "multipleOf 999983": {"type": "integer", "multipleOf": 999983},
    "counted repeat": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "exponential": {"type": "string", "pattern": "^(a?){200}a{200}$"},
    "ambiguous": {"type": "string", "pattern": "^(a+)+$"},
    "allOf itself": {"allOf": [{"$ref": "#"}]},
    "not itself": {"not": {"$ref": "#"}},
    "a reference to itself": {"$ref": "#"},
    "references in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "one of itself": {"oneOf": [{"$ref": "#"}, {"type": "string"}]},
    "itself in every key": {"additionalProperties": {"$ref": "#"}, "patternProperties": {"": {"$ref": "#"}}},
    "1,000 optional keys": object_of(1_000, {"type": "integer"}),
    "lone surrogate": {"const": "\ud800"},
    "lone surrogates as keys": {"properties": {"\ud800": {}, "\udfff\ud800": {}}, "required": ["\ud800"]},
    "lone surrogates in a pattern": {"type": "string", "pattern": "^[\ud800-\udfff]+$"},
    "10,000 strings, no item twice": {
        "type": "array",
        "items": {"enum": [f"option {n}" for n in range(10_000)]},
        "uniqueItems": True,
        "minItems": 9_000,
    },
    "no item twice of many": {
        "type": "array",
        "items": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
        "uniqueItems": True,
        "minItems": 2,
    },
    "keys that backtrack": {
        "type": "object",
        "patternProperties": {"^(a+)+b$": {}, "^(a|aa)+c$": {}},
        "additionalProperties": False,
        "minProperties": 3,
    },
    "1,000 branches": {"anyOf": [{"properties": {f"key{n}": {"const": n}}} for n in range(1_000)]},
    "1,000 branches of which one": {"oneOf": [{"properties": {f"key{n}": {"const": n}}} for n in range(1_000)]},
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True, "whitespace_flexible": True}},
    "overlapping patterns": {
        "type": "object",
        "patternProperties": {f"{c}.*{c}": {"type": "integer"} for c in "abcdefghijklmnop"},
    },
}

REGEXES = ["(a?){500}a{500}", "(a{1000}){0,1000}", "([a-z]{0,1000}x){0,1000}", "(.*a){40}", "(x+x+)+y", "a{65536}"]
GRAMMARS = ['root ::= "a" root', "root ::= (root | root) root", 'root ::= "x"{100000}', 'root ::= ("a"*)*']


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Vocab.of(bpe_tokenizer()), CompilerConfig(cpu_seconds=LIMIT_SECONDS))
    yield compiler
    compiler.close()


def exact_or_refused(compiler: GrammarCompiler, wanted: GrammarSpec) -> None:
    """Compiles and can be walked, or is refused; this process spends little either way."""
    started = time.process_time()
    try:
        grammar = compiler.compile_now(wanted)
    except (GrammarError, GrammarTimeout):
        assert time.process_time() - started < LIMIT_SECONDS
        return
    assert time.process_time() - started < LIMIT_SECONDS
    matcher, row = grammar.matcher(), bitmask.empty(compiler.vocab.size)
    rng = random.Random(0)
    for _ in range(30):
        matcher.fill(row)
        assert matcher.accept([rng.choice(bitmask.ids(row).tolist())]) == 1
        matcher.forced()
        if matcher.finished:
            break


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_hostile_schemas(compiler, name):
    exact_or_refused(compiler, spec.json_schema(SCHEMAS[name]))


@pytest.mark.parametrize("pattern", REGEXES)
def test_hostile_regexes(compiler, pattern):
    try:
        wanted = spec.regex(pattern)
    except GrammarError:
        return
    exact_or_refused(compiler, wanted)


@pytest.mark.parametrize("text", GRAMMARS)
def test_hostile_grammars(compiler, text):
    compiler.compile_now(spec.ebnf('root ::= "a"'))  # the first one imports xgrammar, and that torch
    exact_or_refused(compiler, spec.ebnf(text))


@pytest.mark.slow
def test_others_go_on_while_hostile_schemas_are_compiled(compiler):
    flights = [compiler.compile(spec.json_schema(schema)) for schema in SCHEMAS.values()]
    matcher = compiler.compile_now(spec.regex("[a-z]*")).matcher()
    row = bitmask.empty(compiler.vocab.size)
    token = compiler.vocab.with_bytes(b"a")[0]
    worst = 0.0
    while not all(flight.done() for flight in flights):
        started = time.thread_time()
        matcher.fill(row)
        matcher.accept([token])
        worst = max(worst, time.thread_time() - started)
        time.sleep(0.005)
    assert worst < 0.05


def test_x_guidance_in_a_schema_changes_nothing(compiler):
    untrusted = {
        "type": "object",
        "properties": {"a": {}},
        "x-guidance": {"whitespace_flexible": True, "lenient": True},
    }
    assert not whole(compiler, spec.json_schema(untrusted), '{ "a" : 1 }')
    assert whole(compiler, spec.json_schema(untrusted), '{"a":1}')
