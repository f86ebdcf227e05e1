"""What users of such systems reported, each with the value that is right (sections A to D; E is the engine's)."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglite.errors import GrammarError, GrammarTimeout, GrammarTooLarge, InvalidGrammar, UnsupportedSchema
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from tests.fakes.bpe import bpe_tokenizer
from tests.grammar.helpers import SPECS, legal, random_walk, whole


def accepts(compiler: GrammarCompiler, schema: Any, text: str, **options: Any) -> bool:
    return whole(compiler, spec.json_schema(schema, **options), text)


def refused_or(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    """The text is not accepted, or the schema is refused by name."""
    try:
        return not accepts(compiler, schema, text)
    except UnsupportedSchema as error:
        return bool(error.keyword)


class TestKeywords:
    @pytest.mark.parametrize(
        ("schema", "text"),
        [
            ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),  # R1
            ({"properties": {"k": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}}}, '{"k":"abcd"}'),  # R2
            ({"type": "object", "required": ["a"]}, "{}"),  # R3
            ({"type": "array", "maxItems": 1}, "[1,2]"),  # R3
            ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[1,1]"),  # R5
            ({"type": "integer", "multipleOf": 7}, "13"),  # R5
            ({"type": "array", "contains": {"const": 1}}, "[2]"),  # R5
            ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),  # R5
            ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}'),  # R5
            ({"type": "number", "minimum": 4}, "3.9"),  # R7
            ({"type": "number", "minimum": -0.5, "maximum": 0.5}, "-0.6"),  # R7
            ({"type": "number", "exclusiveMinimum": 0}, "0"),  # R7
            ({"type": "number", "exclusiveMinimum": 0}, "0.0"),  # R7
            ({"type": "integer", "minimum": -5, "maximum": 12}, "13"),  # R7
        ],
    )
    def test_no_keyword_is_dropped_in_silence(self, byte_compiler, schema, text):
        assert refused_or(byte_compiler, schema, text)

    @pytest.mark.parametrize(
        ("schema", "text"),
        [
            ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aa"'),
            ({"type": "object", "required": ["a"]}, '{"a":1}'),  # R3
            ({"type": "array", "maxItems": 1}, "[1]"),
            ({"type": "number", "minimum": 4}, "4.1"),  # R7
            ({"type": "number", "minimum": -0.5, "maximum": 0.5}, "-0.4"),
            ({"type": "integer", "minimum": -5, "maximum": 12}, "-5"),
            ({"enum": ["北京"]}, '"北京"'),  # R15
        ],
    )
    def test_what_a_schema_allows_is_not_refused(self, byte_compiler, schema, text):
        assert accepts(byte_compiler, schema, text)

    def test_r9_what_is_not_enforced_is_named(self, byte_compiler):
        schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "title": "x"}
        plain = byte_compiler.compile_now(spec.json_schema({"type": "array", "items": {"type": "string"}}))
        grammar = byte_compiler.compile_now(spec.json_schema(schema, on_unsupported="validate"))
        status = {item.pointer: item.status for item in grammar.coverage.items}
        assert "/uniqueItems" in status
        assert status["/uniqueItems"] != "annotation"
        assert grammar.coverage.items != plain.coverage.items
        if not grammar.coverage.exact:
            assert grammar.validate('["a","a"]')
            assert grammar.validate('["a","b"]') is None

    @pytest.mark.parametrize("text", ['{"a":1,"a":"oops"}', '{"a":1,"\\u0061":"oops"}'])
    def test_r11_no_key_stands_twice_by_any_spelling(self, byte_compiler, text):
        schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": True}
        assert not accepts(byte_compiler, schema, text)
        assert accepts(byte_compiler, schema, '{"a":1,"b":"fine"}')

    def test_r13_keys_come_in_the_order_of_the_schema(self, byte_compiler):
        schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z", "a"]}
        matcher = byte_compiler.compile_now(spec.json_schema(schema)).matcher()
        assert bytes(matcher.forced()).startswith(b'{"z"')

    def test_r17_white_space_is_what_was_asked_for(self, byte_compiler):
        schema = {"type": "object", "properties": {"a": {}, "b": {}}}
        assert not accepts(byte_compiler, schema, '{"a": 1,"b":2}')
        assert accepts(byte_compiler, schema, '{"a": 1, "b": [1, 2]}', whitespace="single")
        assert accepts(byte_compiler, schema, '{"a":1,"b":[1,2]}', whitespace="single")
        assert whole(byte_compiler, spec.json_object(whitespace="single"), '{"a": 1, "b": {"c": [1, 2]}}')
        assert not whole(byte_compiler, spec.json_object(), '{"a": 1}')

    @pytest.mark.parametrize("description", ["plain", 'it\'s "quoted" {braces}\nand a new line', "\\u0000 /x/ ${"])
    def test_r19_a_description_never_reaches_the_grammar(self, byte_compiler, description):
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": description}}}
        assert accepts(byte_compiler, schema, '{"a":"x"}')
        assert not accepts(byte_compiler, schema, '{"a":1}')


class TestWhiteSpaceAndStopping:
    OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    @pytest.mark.parametrize("whitespace", ["compact", "single"])
    @pytest.mark.parametrize("blank", [" ", "\n", "\t"])
    def test_r20_runs_of_white_space_are_bounded(self, byte_compiler, whitespace, blank):
        matcher = byte_compiler.compile_now(spec.json_schema(self.OBJECT, whitespace=whitespace)).matcher()
        assert matcher.accept([ord("{")]) == 1
        assert matcher.accept([ord(blank)] * 200) <= 1

    @pytest.mark.parametrize("whitespace", ["compact", "single"])
    def test_r21_r23_a_sampler_that_always_wants_white_space_still_finishes(self, whitespace):
        vocab = Vocab.of(bpe_tokenizer())
        compiler = GrammarCompiler(vocab, CompilerConfig(isolate=False))
        schema = {
            "type": "object",
            "properties": {"a": {"const": "x"}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,  # an open object has keys, and a key may be blanks
        }
        matcher = compiler.compile_now(spec.json_schema(schema, whitespace=whitespace)).matcher()
        for _step in range(64):
            if matcher.finished:
                break
            blank_first = sorted(legal(matcher, vocab.size), key=lambda i: not vocab.tokens[i][:1].isspace())
            assert matcher.accept(blank_first[:1]) == 1
        assert matcher.finished
        compiler.close()

    def test_r25_only_stop_tokens_follow_a_complete_value(self, compiler):
        vocab = compiler.vocab
        matcher = compiler.compile_now(spec.json_schema({"const": 1})).matcher()
        assert matcher.accept(vocab.with_bytes(b"1")[:1]) == 1
        assert legal(matcher, vocab.size) == sorted(vocab.stop_ids)
        assert matcher.accept(vocab.with_bytes(b"x")[:1]) == 0

    def test_r26_every_stop_id_waits_for_the_end(self, byte_compiler):
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        matcher = byte_compiler.compile_now(spec.json_schema(schema)).matcher()
        matcher.accept(list(b'{"a":"x'))
        assert not {257, 258} & set(legal(matcher, 259))
        assert matcher.accept([257]) == matcher.accept([258]) == 0
        matcher.accept(list(b'"}'))
        assert set(legal(matcher, 259)) == {257, 258}

    def test_r27_special_tokens_are_never_string_content(self, compiler):
        vocab = compiler.vocab
        special = {i for i, text in enumerate(vocab.tokens) if not text}
        matcher = compiler.compile_now(spec.json_schema({"type": "string"})).matcher()
        for byte in b'"abc':
            matcher.accept(vocab.with_bytes(bytes([byte]))[:1])
        assert not special & set(legal(matcher, vocab.size))

    def test_a_special_tokens_spelling_is_plain_text_in_a_string(self, bpe_compiler):
        matcher = bpe_compiler.compile_now(spec.json_schema({"const": "<|eos|>"})).matcher()
        tokens = matcher.forced()
        assert not set(tokens) & set(bpe_compiler.vocab.stop_ids)


class TestHostile:
    def test_r35_a_format_that_nobody_knows(self, byte_compiler):
        grammar = byte_compiler.compile_now(spec.json_schema({"type": "string", "format": "iban"}))
        assert {item.keyword: item.status for item in grammar.coverage.items}["format"] == "annotation"

    def test_r37_a_broken_regex_is_refused(self):
        with pytest.raises(InvalidGrammar):
            spec.regex("[a")

    def test_r39_a_failure_of_the_late_compile_ends_one_request(self, byte_compiler, monkeypatch):
        with pytest.raises(GrammarError):
            byte_compiler.compile_now(spec.regex(r"a[^\s\S]"))  # parses, and no text matches
        assert whole(byte_compiler, spec.regex("ab"), "ab")

    def test_r41_a_grammar_without_a_root_rule(self):
        with pytest.raises(InvalidGrammar):
            spec.ebnf('rout ::= "x"')

    def test_r43_deep_nesting_is_refused(self, byte_compiler):
        schema: dict[str, Any] = {}
        for _ in range(900):
            schema = {"type": "array", "items": schema}
        with pytest.raises(GrammarTooLarge):
            byte_compiler.compile_now(spec.json_schema(schema))

    def test_r45_a_union_that_refers_to_itself(self, byte_compiler):
        schema = {"$ref": "#/$defs/V", "$defs": {"V": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/V"}]}}}
        assert accepts(byte_compiler, schema, '"x"')
        assert not accepts(byte_compiler, schema, "1")

    def test_r53_nested_unions_are_exact_or_refused_in_time(self):
        schema: dict[str, Any] = {"type": "string"}
        for depth in range(8):
            branches = [{"type": "object", "properties": {name: schema, "n": {"const": depth}}} for name in "abc"]
            schema = {"oneOf": branches}
        compiler = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(quick_seconds=0.1, cpu_seconds=0.5))
        flight = compiler.compile(spec.json_schema(schema))
        assert whole(compiler, spec.json_schema({"const": 1}), "1")  # others go on meanwhile
        try:
            assert flight.result(timeout=60).coverage.exact
        except (GrammarError, GrammarTimeout):
            pass
        finally:
            compiler.close()

    def test_r55_a_schema_that_refers_to_itself(self, byte_compiler):
        for schema in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}):  # says nothing, so anything goes; or is refused
            try:
                grammar = byte_compiler.compile_now(spec.json_schema(schema))
            except GrammarError:
                continue
            assert grammar.matcher().accept(list(b'{"a":1}')) == 7
        nested = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
        assert accepts(byte_compiler, nested, '{"next":{"next":{}}}')

    def test_r59_nothing_is_written_to_disk(self, byte_compiler, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for number in range(50):
            byte_compiler.compile_now(spec.json_schema({"title": str(number), "type": "integer"}))
        assert list(Path(tmp_path).iterdir()) == []

    def test_r61_bounded_lists_of_bounded_strings_compile_in_seconds(self, byte_compiler):
        strings = {f"s{n}": {"type": "string", "maxLength": 20 + 36 * n} for n in range(6)}
        lists = {
            f"l{n}": {"type": "array", "minItems": 5, "maxItems": 15, "items": {"type": "string", "maxLength": 200}}
            for n in range(3)
        }
        names = [*strings, *lists]
        schema = {"type": "object", "properties": {**strings, **lists}, "required": names}
        started = time.process_time()
        byte_compiler.compile_now(spec.json_schema(schema))
        assert time.process_time() - started < 2


def test_r65_copies_of_one_schema_do_not_touch_each_other(compiler):
    size = compiler.vocab.size
    grammar = compiler.compile_now(SPECS["json_schema"])
    first = grammar.matcher()
    before = bitmask.empty(size)
    first.fill(before)
    for seed in range(8):
        random_walk(grammar.matcher(), size, steps=20, rng=random.Random(seed))
    after = bitmask.empty(size)
    first.fill(after)
    assert np.array_equal(before, after)
