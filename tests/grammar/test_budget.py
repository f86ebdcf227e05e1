from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from sglite.errors import InvalidRequest
from sglite.grammar import bitmask, spec
from sglite.grammar.closing import JsonState, closing_tokens
from sglite.grammar.reach import lark_reach
from sglite.grammar.schema import prepare
from sglite.protocol import GrammarSpec
from tests.grammar.helpers import PERSON, legal

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {
            "type": "object",
            "properties": {"b": {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}},
            "required": ["b"],
        }
    },
    "required": ["a"],
}
RECORDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": PERSON}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}
SCHEMAS = {
    "nested": NESTED,
    "person": PERSON,
    "records": RECORDS,
    "tree": TREE,
    "anything": {},
    "text": {"type": "string"},
}


def shortest(compiler, grammar: GrammarSpec) -> int:
    tokens = closing_tokens(compiler.compile_now(grammar).matcher(), compiler.vocab, JsonState())
    assert tokens is not None
    return len(tokens)


def generate(compiler, grammar: GrammarSpec, budget: int, rng: random.Random, *, prefer: bytes = b"") -> bytes:
    """What a sampler writes under the budget: random, or always fond of some characters."""
    matcher = compiler.compile_now(grammar).matcher(budget=budget)
    vocab = compiler.vocab
    tokens: list[int] = []
    while len(tokens) < budget and not matcher.finished:
        forced = matcher.forced()
        if forced and rng.random() < 0.5:
            assert matcher.accept(forced) == len(forced)
            tokens += forced
            continue
        options = [i for i in legal(matcher, vocab.size) if i not in vocab.stop_ids]
        if not options:
            break
        fond = [i for i in options if prefer and any(byte in prefer for byte in vocab.tokens[i])]
        token_id = rng.choice(fond or options)
        assert matcher.accept([token_id]) == 1
        tokens.append(token_id)
    assert len(tokens) <= budget
    assert matcher.can_stop, vocab.bytes_of(tokens)
    return vocab.bytes_of(tokens)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("extra", [0, 3, 60])
def test_a_value_is_complete_when_its_tokens_run_out(compiler, name, extra):
    grammar = spec.json_schema(SCHEMAS[name])
    budget = shortest(compiler, grammar) + extra
    for seed, prefer in enumerate((b"", b"[{,", b"abc ")):
        text = generate(compiler, grammar, budget, random.Random(seed), prefer=prefer)
        jsonschema.validate(json.loads(text.decode()), SCHEMAS[name])


@pytest.mark.parametrize("kind", ["json_object", "regex", "choice"])
@pytest.mark.parametrize("extra", [0, 2, 30])
def test_other_kinds_close_too(compiler, kind, extra):
    grammar = {
        "json_object": spec.json_object(),
        "regex": spec.regex("(yes|no way|maybe ){2,}[0-9]{3}"),
        "choice": spec.choice(["a long way round", "short", "middle one"]),
    }[kind]
    budget = shortest(compiler, grammar) + extra
    for seed in range(3):
        text = generate(compiler, grammar, budget, random.Random(seed))
        matcher = compiler.compile_now(grammar).matcher()
        tokens = compiler.vocab.spell(text)
        assert matcher.accept(tokens) == len(tokens)
        assert matcher.can_stop


def test_r31_the_shortest_answer_fits_and_one_token_less_is_refused(compiler):
    grammar = compiler.compile_now(spec.json_schema(NESTED))
    least = len(compiler.vocab.encode('{"a":{"b":{"c":0}}}'))
    grammar.matcher(budget=least)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        grammar.matcher(budget=least - 1)


def test_optional_keys_are_left_out_of_the_shortest_answer(byte_compiler):
    schema = {
        "type": "object",
        "properties": {"aaa": {"type": "string"}, "bbb": {"type": "integer"}, "zzz": {"enum": ["long one", "x"]}},
        "required": ["zzz"],
        "additionalProperties": False,
    }
    matcher = byte_compiler.compile_now(spec.json_schema(schema)).matcher()
    tokens = closing_tokens(matcher, byte_compiler.vocab, JsonState())
    assert tokens is not None
    assert bytes(tokens) == b'{"zzz":"x"}'


def test_plenty_of_tokens_change_nothing(bpe_compiler):
    grammar = bpe_compiler.compile_now(spec.json_schema(PERSON))
    free, budgeted = grammar.matcher(), grammar.matcher(budget=100_000)
    size = bpe_compiler.vocab.size
    rows = bitmask.empty(size, rows=2)
    rng = random.Random(3)
    for _ in range(25):
        assert bpe_compiler.filler.fill([free, budgeted], [0, 1], rows) == {}
        assert np.array_equal(rows[0], rows[1])
        token_id = rng.choice(bitmask.ids(rows[0]).tolist())
        assert free.accept([token_id]) == budgeted.accept([token_id]) == 1
        if free.finished:
            break


@pytest.mark.parametrize("seed", range(3))
def test_operations_agree_with_each_other(bpe_compiler, seed):
    rng = random.Random(seed)
    size = bpe_compiler.vocab.size
    matcher = bpe_compiler.compile_now(spec.json_schema(RECORDS)).matcher(budget=45)
    rows, tokens = [], []
    while not matcher.finished:
        rows.append(legal(matcher, size))
        twin = matcher.fork()
        assert legal(twin, size) == rows[-1]
        tokens.append(rng.choice(rows[-1]))
        assert matcher.accept(tokens[-1:]) == 1
    matcher.rollback(len(tokens))
    for row, token_id in zip(rows, tokens, strict=True):
        assert set(legal(matcher, size)) == set(row)
        matcher.accept([token_id])


def test_kinds_without_a_bound_are_refused(byte_compiler):
    grammar = byte_compiler.compile_now(spec.lark('start: "a"+'))
    with pytest.raises(InvalidRequest, match="close_on_budget"):
        grammar.matcher(budget=10)


def test_reach_is_the_longest_shortest_text():
    def reach(schema: Any) -> int:
        return lark_reach(prepare(json.dumps(schema)).lark).opening

    closed = {
        "type": "object",
        "properties": {"key": {"const": "abc"}},
        "required": ["key"],
        "additionalProperties": False,
    }
    assert reach(closed) == len('{"key":"abc"}')
    assert reach({"type": "string", "minLength": 50}) >= 52
    assert reach({"type": "array", "minItems": 9, "items": {"const": 1}}) >= 19
    assert reach({}) < 20
