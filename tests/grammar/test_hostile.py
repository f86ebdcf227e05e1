"""Inputs made to hurt: each is exact or refused, within its limits, and others go on meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
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


def doubled(depth: int, step: Callable[[str], Any], last: Any) -> dict[str, Any]:
    """Definitions d1, d2 ..., each made of references to the one before."""
    below = {f"d{i}": step(f"#/$defs/d{i - 1}") for i in range(1, depth + 1)}
    return {"$ref": f"#/$defs/d{depth}", "$defs": {"d0": last, **below}}


def within(depth: int, step: Callable[[Any], Any], last: Any) -> Any:
    for _ in range(depth):
        last = step(last)
    return last


LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCHEMAS |= {
    "100 patterns of keys": {"patternProperties": {f"^k{n}": {"type": "integer"} for n in range(100)}},
    "40 patterns within each other": {"patternProperties": {f"^{'a' * n}": {"minimum": n} for n in range(1, 41)}},
    "26 things that a string must not hold": {
        "type": "string",
        "allOf": [{"not": {"pattern": f"{c}.*{c}"}} for c in LETTERS],
    },
    "12 patterns at once": {
        "type": "string",
        "allOf": [{"pattern": f"{c}.{{{n}}}{c}"} for n, c in enumerate("abcdefghijkl")],
    },
    "words that a bounded string must not hold": {
        "type": "string",
        "minLength": 50,
        "maxLength": 400,
        "allOf": [{"not": {"pattern": word}} for word in ("foo", "bar", "baz", "qux", "quux")],
    },
    "counted words within a bounded string": {"type": "string", "pattern": "^([a-z]+ ?){1,200}$", "minLength": 1000},
    "a link with more to it": {
        "type": "string",
        "format": "uri",
        "pattern": "^https?://.*\\.com.*$",
        "maxLength": 200,
        "not": {"pattern": "localhost"},
    },
    "12 looks ahead": {
        "type": "string",
        "pattern": "^" + "".join(f"(?=.*{c}.{{3}}{c})" for c in "abcdefghijkl") + ".{8,200}$",
    },
    "what may not come, far on": {"type": "string", "pattern": "^(?!.*(foo|bar|baz)).{5,300}$", "minLength": 100},
    "counts within counts": {"type": "string", "pattern": "^(([a-z]{1,40}-){1,40}[0-9]{1,40}){1,40}$"},
    "5,000 alternatives": {"type": "string", "pattern": f"^({'|'.join(f'w{n}x' for n in range(5000))})$"},
    "40 times anything": {"type": "string", "pattern": "^" + ".*a" * 40 + "$"},
    "one of 2^12": within(12, lambda s: {"oneOf": [{"properties": {k: s}, "required": [k]} for k in "ab"]}, {}),
    "25 choices of two keys": {
        "allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(25)]
    },
    "60 branches that overlap": {
        "oneOf": [{"properties": {f"v{n}": {"type": "integer"}}, "required": ["t"]} for n in range(60)]
    },
    "200 ranges": {"oneOf": [{"type": "integer", "minimum": 10 * n, "maximum": 10 * n + 9} for n in range(200)]},
    "100 ranges that overlap": {"oneOf": [{"type": "integer", "minimum": n, "maximum": n + 50} for n in range(100)]},
    "ifs within ifs": within(
        14, lambda s: {"if": {"properties": {"k": {"const": 1}}}, "then": s, "else": {"properties": {"z": s}}}, {}
    ),
    "16 keys that change each other": {
        "properties": {f"k{n}": {"type": "integer"} for n in range(16)},
        "dependentSchemas": {f"k{n}": {"properties": {f"k{(n + 1) % 16}": {"minimum": n}}} for n in range(16)},
    },
    "keys that need each other in a ring": {
        "dependentRequired": {f"k{n}": [f"k{(n + 1) % 200}"] for n in range(200)},
    },
    "arrays of pairs of pairs": doubled(
        30, lambda ref: {"type": "array", "prefixItems": [{"$ref": ref}] * 2, "minItems": 2}, {}
    ),
    "allOf that doubles": doubled(25, lambda ref: {"allOf": [{"$ref": ref}, {"required": ["a"]}, {"$ref": ref}]}, {}),
    "anyOf that doubles": doubled(
        20, lambda ref: {"anyOf": [{"$ref": ref}, {"allOf": [{"$ref": ref}, {"maximum": 3}]}]}, {"minimum": 0}
    ),
    "not that doubles": doubled(12, lambda ref: {"not": {"allOf": [{"not": {"$ref": ref}}, {"required": ["a"]}]}}, {}),
    "two that are not each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"not": {"$ref": "#/$defs/a"}}},
    },
    "itself as a key that must be there": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "3,000 references in a row": doubled(3000, lambda ref: {"$ref": ref}, {"type": "null"}),
    "2,000 definitions in a row": doubled(2000, lambda ref: {"properties": {"n": {"$ref": ref}}}, {"type": "null"}),
    "3,000 anchors": {
        "anyOf": [{"$ref": f"#a{n}"} for n in range(3000)],
        "$defs": {f"d{n}": {"$anchor": f"a{n}", "const": n} for n in range(3000)},
    },
    "a long pointer": {"$ref": "#/" + "~0/" * 5000},
    "ends of doubles": {"type": "number", "minimum": 5e-324, "maximum": 1.7976931348623157e308},
    "380 digits": {"type": "integer", "minimum": int("17" * 190), "maximum": int("93" * 190)},
    "multipleOf pi": {"type": "number", "multipleOf": 3.14159265358979},
    "multipleOf of nine primes": {
        "type": "integer",
        "allOf": [{"multipleOf": p} for p in (2, 3, 5, 7, 11, 13, 17, 19, 23)],
    },
    "no multiple of many": {"type": "integer", "allOf": [{"not": {"multipleOf": p}} for p in (2, 3, 5, 7, 11, 13)]},
    "3,000 objects": {"enum": [{"a": n, "b": [n, str(n)]} for n in range(3000)]},
    "long strings": {"enum": ["x" * 10_000 + str(n) for n in range(60)]},
    "one forced string of 200,000": {"const": "y" * 200_000},
    "20,000 keys": object_of(20_000, True),
    "half of 1,500 keys required": {**object_of(1500, {}), "required": [f"key{n}" for n in range(0, 1500, 2)]},
    "almost all of 300 keys": {
        **object_of(300, {"type": "boolean"}),
        "minProperties": 298,
        "maxProperties": 299,
        "additionalProperties": False,
    },
    "400 objects that begin alike": {
        "anyOf": [
            {"properties": {"t": {"type": "string"}, f"v{n}": {}}, "required": ["t", f"v{n}"]} for n in range(400)
        ]
    },
    "1,000 matching items": {"type": "array", "contains": {"const": 1}, "minContains": 1000, "maxContains": 1001},
    "90,000 items": within(
        2, lambda s: {"type": "array", "items": s, "minItems": 300, "maxItems": 300}, {"type": "null"}
    ),
    "3,000 first items": {"type": "array", "prefixItems": [{"const": n} for n in range(3000)], "items": False},
    "no item twice, 30 deep": within(
        30, lambda s: {"type": "array", "items": s, "uniqueItems": True, "minItems": 1}, {}
    ),
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
