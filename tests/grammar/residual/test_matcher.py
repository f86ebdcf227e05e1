"""Rules beside the grammar: what the mask allows, accept takes, can be completed, and keeps the rules."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from sglite.errors import UnsupportedSchema
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.fill import BatchFiller
from sglite.grammar.matcher import Matcher
from sglite.grammar.vocab import Vocab
from tests.grammar.helpers import legal, row_of, whole

# Tokens over the borders of keys, items and values.
_SPANNING = [
    '","', '":', '":"', '"}', '"]', '",', ',"', '{"', '["', '[{"', '},{"', '"},{"', '""', '"":', '"a"', '"a":', 'a":',
    'ab', 'ab":', '"a":1,"a":', '"a":1,"b":', 'a","a', 'a","b"', '{"a":1,"a":2}', '{"b":{"a":', '1,1', '1,', '[1,1]',
    '[1,2', '[],[]', '{},{}', '{"a":1},{"a":1}', '{"a":1},{"a":2}', '"b","b"', 'b","a","b"', '"},{', '}],', '1],[1',
    'true,', 'null,null', '\\"', 'a\\"":',
]  # fmt: skip


def _spanning_vocab() -> Vocab:
    texts = [*(bytes([i]) for i in range(256)), *(text.encode() for text in _SPANNING)]
    return Vocab(
        tokens=(*texts, b""),
        names=(*([b""] * len(texts)), b"<|end|>"),
        stop_ids=(len(texts),),
        encode=lambda text: list(text.encode()),
    )


@pytest.fixture(scope="module")
def spanning() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(_spanning_vocab(), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


OPEN: dict[str, Any] = {"type": "object", "properties": {"ab": {}}, "minProperties": 3}
LETTERS: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^(a|b|ab)$": {"type": "integer"}},
    "additionalProperties": False,
    "minProperties": 2,
}
NAMED: dict[str, Any] = {
    "propertyNames": {"enum": ["a", "b", 'a"', "ab"]},
    "additionalProperties": {"type": "null"},
    "minProperties": 4,
    "type": "object",
}
WORDS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 3}
PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[ab]?$"}, "b": {"enum": [1, 11]}},
    "required": ["b"],
    "additionalProperties": False,
}
PAIRS: dict[str, Any] = {"type": "array", "items": PAIR, "uniqueItems": True, "minItems": 2}
SMALL: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 11}, {"pattern": "^(a|b|ab)$", "type": "string"}]},
    "uniqueItems": True,
    "minItems": 11,
}
ANY_ITEMS: dict[str, Any] = {
    "properties": {"a": {"uniqueItems": True, "type": "array"}},
    "required": ["a"],
    "type": "object",
}
MAPS: dict[str, Any] = {"type": "array", "items": {"type": "object"}, "uniqueItems": True, "minItems": 2}
NESTED: dict[str, Any] = {"type": "array", "items": WORDS, "uniqueItems": True, "minItems": 2}
VOICES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^[ab]?$"},
            "b": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
            "ab": {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "minItems": 1},
        },
        "required": ["b"],
        "additionalProperties": False,
    },
    "uniqueItems": True,
    "minItems": 2,
}
ANY_OR_PAIR: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"not": {"type": "string"}}, {"type": "string", "pattern": "^[ab]?$"}, PAIR]},
    "uniqueItems": True,
    "minItems": 2,
}
SOME_OF_FEW: dict[str, Any] = {
    "type": "array",
    "items": {"enum": ["a", "b", "ab", 1, 11]},
    "contains": {"type": "integer"},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 3,
}
SOME_OF_MANY: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string"},
    "contains": {"enum": ["ab", "b"]},
    "uniqueItems": True,
    "maxItems": 3,
}
TWICE: dict[str, Any] = {"type": "array", "not": {"uniqueItems": True}}
KEYS = {
    "twice": TWICE,
    "voices": VOICES,
    "some of many": SOME_OF_MANY,
    "open": OPEN,
    "letters": LETTERS,
    "named": NAMED,
    "words": WORDS,
    "pairs": PAIRS,
    "small": SMALL,
    "any": ANY_ITEMS,
    "maps": MAPS,
}


@pytest.mark.parametrize(
    ("schema", "text", "accepted"),
    [
        ({"type": "object"}, '{"a":1,"a":2}', False),
        ({"type": "object"}, '{"a":{"a":1},"b":{"a":1}}', True),
        ({"type": "object"}, '{"a":[{"b":1},{"b":1}],"b":"\\",\\"b\\":"}', True),
        ({"type": "object"}, '{"a":[{"b":1,"b":2}]}', False),
        ({"type": "object"}, '{"":1,"":1}', False),
        ({"type": "object"}, '{"a\\"":1,"a\\"":1}', False),
        ({"type": "object"}, '{"a\\"":1,"a":1}', True),
        ({"minProperties": 2, "type": "object"}, '{"a":1,"a":1}', False),
        (LETTERS, '{"a":1,"b":1,"ab":2}', True),
        (LETTERS, '{"a":1,"ab":1,"b":2,', False),
        (NAMED, '{"ab":null,"a":null,"a\\"":null,"b":null}', True),
        (NAMED, '{"ab":null,"a":null,"a":null,"b":null}', False),
        (WORDS, '["a","b","ab"]', True),
        (WORDS, '["a","b","a"]', False),
        (PAIRS, '[{"b":1},{"b":11},{"a":"","b":1}]', True),
        (PAIRS, '[{"b":1},{"b":1}]', False),
        (PAIRS, '[{"a":"b","b":1},{"a":"b","b":11},{"a":"b"', False),
        (SMALL, "[1,11,2,3,4,5,6,7,8,9,10]", True),
        (SMALL, '[1,11,2,3,4,5,6,7,8,9,10,"a","b","ab"]', True),
        (SMALL, '[1,11,2,3,4,5,6,7,8,9,10,"a","b","ab",', False),
        (SMALL, '[1,11,2,3,4,5,6,7,8,9,"a",1', False),
        (ANY_ITEMS, '{"a":[1,"1",[1],{"1":1},null],"b":[1,1]}', True),
        (ANY_ITEMS, '{"a":[{"1":1,"2":2},{"2":2,"1":1}]}', False),
        ({"type": "array", "uniqueItems": True}, "[null,-1.5,true,-1,false,1.5]", True),
        ({"type": "array", "uniqueItems": True}, "[null,-1.5,null]", False),
        ({"uniqueItems": True}, '{"a":"a"}', True),  # the rule is for arrays
        ({"items": {"uniqueItems": True}, "type": "array"}, '[{"a":"a","b":"a"},["a"]]', True),
        (VOICES, '[{"b":[]},{"b":[],"ab":["a"]},{"b":["a"]}]', True),
        (VOICES, '[{"b":[]},{"b":[],"ab":["a","a"', False),
        (VOICES, '[{"b":["a","b"]},{"b":["a","b"]}', False),
        (ANY_OR_PAIR, '["a",{"b":1},[],{"b":1,"c":1}]', True),
        (ANY_OR_PAIR, '["a",{"b":1},[],{"b":1}', False),
        (SOME_OF_FEW, '["a",11]', True),
        (SOME_OF_FEW, '["a","b","ab"]', False),
        (SOME_OF_FEW, "[1,11,1]", False),
        (SOME_OF_MANY, '["a","c","b"]', True),
        (SOME_OF_MANY, '["ab","c","ab"]', False),
        (SOME_OF_MANY, '["a","c","d"]', False),
        (TWICE, "[1,2,1.0,3]", True),
        (TWICE, '[{"a":[1,1]},"a",1]', False),
        (TWICE, "[1,2", False),
        (MAPS, '[{"a":1,"b":1.0},{"b":1,"a":1}]', False),
        (MAPS, '[{"a":1,"b":1.0},{"b":1,"a":1,"c":1}]', True),
    ],
)
def test_no_key_and_no_item_stands_twice(compiler, schema, text, accepted):
    assert whole(compiler, spec.json_schema(schema), text) == accepted
    matcher = compiler.compile_now(spec.json_schema(schema)).matcher()
    for byte in text.encode():  # with a mask before each, as in decoding
        token_id = compiler.vocab.with_bytes(bytes((byte,)))[0]
        if token_id not in legal(matcher, compiler.vocab.size) and not matcher.forced():
            break
        if not matcher.accept([token_id]):
            break
    else:
        assert matcher.can_stop == accepted
        return
    assert not accepted


def test_a_json_object_has_no_key_twice(compiler):
    assert whole(compiler, spec.json_object(), '{"a":1,"b":{"a":1}}')
    assert not whole(compiler, spec.json_object(), '{"a":1,"a":1}')


def test_keys_are_apart_with_blanks_too(compiler):
    grammar = spec.json_schema({"type": "object"}, whitespace="single")
    assert whole(compiler, grammar, '{"a": 1, "b": {"a": 1}}')
    assert not whole(compiler, grammar, '{"a": 1, "a": 2}')


def _walk(matcher: Matcher, vocab: Vocab, rng: random.Random, *, steps: int) -> Iterator[set[int]]:
    """Go on at random, fond of what ends values; gives what is legal at each place."""
    for _ in range(steps):
        allowed = legal(matcher, vocab.size)
        yield set(allowed)
        if matcher.finished:
            return
        fond = [i for i in allowed if i in vocab.stop_ids or set(vocab.tokens[i]) <= set(b'ab"{}[],:1')]
        assert matcher.accept([rng.choice(fond or allowed)]) == 1


def ends_value_and_goes_on(token: bytes) -> bool:
    """Where parts can run out a mask may lack such a token that accept takes; shorter ones say the same."""
    return b"," in token[1:]


@pytest.mark.parametrize("name", sorted(KEYS))
@pytest.mark.parametrize("seed", range(8))
def test_accept_takes_what_the_mask_allows_and_nothing_else(spanning, name, seed):
    vocab, rng = spanning.vocab, random.Random(seed)
    matcher = spanning.compile_now(spec.json_schema(KEYS[name])).matcher()
    for allowed in _walk(matcher, vocab, rng, steps=40):
        forced = matcher.forced()
        for token_id in range(vocab.size):
            taken = matcher.accept([token_id])
            matcher.rollback(taken)
            if token_id in allowed:
                assert taken == 1, vocab.tokens[token_id]
            elif not forced and not ends_value_and_goes_on(vocab.tokens[token_id]):
                assert taken == 0, vocab.tokens[token_id]


@pytest.mark.parametrize("name", sorted(KEYS))
@pytest.mark.parametrize("seed", range(10))
def test_every_position_can_be_completed(spanning, name, seed):
    """A walk that ends, ends with a valid value; none gets stuck."""
    vocab, rng = spanning.vocab, random.Random(seed)
    matcher = spanning.compile_now(spec.json_schema(KEYS[name])).matcher()
    for _ in _walk(matcher, vocab, rng, steps=120):
        pass
    if matcher.finished:
        pairs: list[list[str]] = []
        value = json.loads(
            bytes(matcher._text), object_pairs_hook=lambda found: pairs.append([k for k, _ in found]) or dict(found)
        )
        assert all(len(set(names)) == len(names) for names in pairs)
        jsonschema.validate(value, KEYS[name])


@pytest.mark.parametrize("name", sorted(KEYS))
def test_rollback_and_fork_keep_the_rules(spanning, name):
    vocab, rng = spanning.vocab, random.Random(3)
    matcher = spanning.compile_now(spec.json_schema(KEYS[name])).matcher()
    rows, taken = [row_of(matcher, vocab.size)], []
    for _ in range(30):
        allowed = [i for i in bitmask.ids(rows[-1]).tolist() if i not in vocab.stop_ids]
        if not allowed:
            break
        fond = [i for i in allowed if set(vocab.tokens[i]) <= set(b'ab"{},:1')]
        taken.append(rng.choice(fond or allowed))
        assert matcher.accept(taken[-1:]) == 1
        rows.append(row_of(matcher, vocab.size))
    twin = matcher.fork()
    for back in range(1, len(rows)):
        twin.rollback(1)
        assert np.array_equal(row_of(twin, vocab.size), rows[-1 - back])
    assert twin.accept(taken) == len(taken)
    assert np.array_equal(row_of(matcher, vocab.size), rows[-1])


def test_a_draft_that_repeats_a_key_is_cut(spanning):
    matcher = spanning.compile_now(spec.json_schema({"type": "object"})).matcher()
    draft = list(b'{"a":1,"a":1}')
    assert matcher.accept(draft) == draft.index(ord('"'), 8)


def test_forced_text_never_repeats(spanning):
    schema = {"type": "object", "patternProperties": {"^(key|kez)$": {"const": 1}}, "additionalProperties": False}
    matcher = spanning.compile_now(spec.json_schema(schema)).matcher()
    assert matcher.accept(list(b'{"key":1')) == 8
    assert bytes(matcher.forced()) == b""
    assert matcher.accept(list(b',"ke')) == 4
    assert legal(matcher, spanning.vocab.size) == [ord("z")]
    assert matcher.accept(list(b'z":1')) == 4
    assert ord(",") not in legal(matcher, spanning.vocab.size)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (
            {"type": "array", "items": {"pattern": "^[ab]$", "type": "string"}, "uniqueItems": True, "minItems": 3},
            "/uniqueItems",
        ),
        ({"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "array", "maxItems": 3}]}, "/anyOf/0/uniqueItems"),
        ({"items": {"multipleOf": 0.3}, "type": "array", "uniqueItems": True}, "/uniqueItems"),
        (
            {
                "type": "array",
                "uniqueItems": True,
                "items": {"type": "array", "items": {"type": "object"}, "maxItems": 1},
            },
            "/uniqueItems",
        ),
    ],
)
def test_where_items_could_get_stuck_they_are_refused_or_validated(compiler, schema, pointer):
    with pytest.raises(UnsupportedSchema) as caught:
        compiler.compile_now(spec.json_schema(schema))
    assert (caught.value.pointer, caught.value.keyword) == (pointer, "uniqueItems")
    coverage = compiler.compile_now(spec.json_schema(schema, on_unsupported="validate")).coverage
    assert [item.pointer for item in coverage.items if item.status == "validated"] == [pointer]


def test_where_an_item_may_find_no_room_to_stand_twice_that_is_refused(compiler):
    with pytest.raises(UnsupportedSchema) as caught:
        compiler.compile_now(spec.json_schema({**TWICE, "maxItems": 5}))
    assert caught.value.pointer == "/not/uniqueItems"
    both = {"type": "array", "uniqueItems": True, "not": {"uniqueItems": True}}
    with pytest.raises(UnsupportedSchema, match="no value"):
        compiler.compile_now(spec.json_schema(both))


def test_where_two_keys_must_exist_that_is_proven_or_refused(compiler):
    few = {"type": "object", "patternProperties": {"^[ab]$": {}}, "additionalProperties": False}
    assert whole(compiler, spec.json_schema({**few, "minProperties": 2}), '{"a":1,"b":1}')
    with pytest.raises(UnsupportedSchema, match="no value satisfies"):
        compiler.compile_now(spec.json_schema({**few, "minProperties": 3}))
    more = {**few, "patternProperties": {"^[a-z]b?$": {}}}
    assert whole(compiler, spec.json_schema({**more, "minProperties": 40}), _object(40))
    with pytest.raises(UnsupportedSchema) as caught:
        compiler.compile_now(spec.json_schema({**more, "minProperties": 70}))
    assert caught.value.pointer == "/minProperties"


def _object(size: int) -> str:
    names = [a + b for b in ("", "b") for a in "abcdefghijklmnopqrstuvwxyz"]
    return json.dumps(dict.fromkeys(names[:size], 1), separators=(",", ":"))


def test_where_no_rule_can_be_broken_the_mask_is_the_shared_one(bpe_compiler):
    """An open object's rows cost what a closed one's do, but where keys begin or may be repeated."""
    vocab, filler = bpe_compiler.vocab, BatchFiller(1)
    matcher = bpe_compiler.compile_now(spec.json_schema({"type": "object"})).matcher()
    shared = []
    for byte in b'{"a":"b c","b":[1],"a':
        (mask,), failures = filler.shared([matcher])
        assert not failures
        if mask is not None:
            assert np.array_equal(mask.words, row_of(matcher, vocab.size))
        shared.append(mask is not None)
        assert matcher.accept(vocab.with_bytes(bytes((byte,)))[:1]) == 1
    assert sum(shared) > len(shared) // 2
