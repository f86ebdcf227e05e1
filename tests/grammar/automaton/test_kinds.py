"""Expressions, choices, any JSON object and calls beside text are followed like schemas are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import llguidance
import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.automaton.classes import DIGITS, SPACES
from sglite.grammar.compiler import CompilerConfig, Grammar, GrammarCompiler
from sglite.grammar.engines.llguidance import LLGuidanceEngine, LLGuidanceGrammar
from sglite.grammar.tools import AnswerSchema, CallSyntax, ToolAnswer, ToolCall, tools
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec
from tests.grammar.automaton.test_followed import SCHEMAS, same, tricky_vocab, walk

CALLS = tuple(ToolCall(name, json.dumps(SCHEMAS[name])) for name in ("short strings", "numbers"))
TAGGED, BARE = CallSyntax("<c>", "</c>", "arguments", "\n"), CallSyntax("", "", "parameters", "; ")

KINDS: dict[str, GrammarSpec] = {
    "regex": spec.regex(r"(the|a) name[0-9]{2,5}(,\d+)*"),
    "any text": spec.regex(r'"?[^"\n]*[.!]'),
    "dots": spec.regex(r"a.{0,3}(b|日)+\s?"),
    "choice": spec.choice(["true", "tr", "name", "names and tags", '"quoted", "é"', "日本"]),
    "object": spec.json_object(),
    "object with blanks": spec.json_object(whitespace="single"),
    "calls beside text": tools(ToolAnswer(calls=CALLS, syntax=TAGGED)),
    "one call beside text": tools(ToolAnswer(calls=CALLS, syntax=TAGGED, several=False)),
    "calls without a tag": tools(ToolAnswer(calls=CALLS, syntax=BARE)),
    "calls or an answer": tools(ToolAnswer(calls=CALLS, syntax=TAGGED, answer=AnswerSchema('{"type":"integer"}'))),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))
    yield made
    made.close()


def grammar_of(compiler: GrammarCompiler, name: str) -> LLGuidanceGrammar:
    grammar = compiler.compile_now(KINDS[name])
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    if grammar.base.automaton is None:
        grammar.base._read()
    return grammar.base


@pytest.mark.parametrize("name", KINDS)
def test_masks_ends_and_forced_text_are_those_of_the_engine(compiler: GrammarCompiler, name: str) -> None:
    vocab = compiler.vocab
    grammar = grammar_of(compiler, name)
    assert grammar.automaton is not None, "it is followed"
    for seed in range(8):
        rng = random.Random(f"{name}/{seed}")
        followed, exact = grammar.matcher(), grammar.exact_matcher()
        walk(followed, exact, vocab, rng, 60)


@pytest.mark.parametrize("name", ["calls beside text", "one call beside text"])
def test_a_call_within_text_takes_hold_where_its_tag_is_complete(compiler: GrammarCompiler, name: str) -> None:
    vocab = compiler.vocab
    grammar = grammar_of(compiler, name)
    text = 'a<b <c <<c>\n{"name": "numbers", "arguments": {"age": 1, "tags": 7}}\n</c>the<c'
    if name.startswith("one"):
        text = text[text.index("<c>") :].removesuffix("the<c")
    followed, exact = grammar.matcher(), grammar.exact_matcher()
    so_far: list[int] = []
    for token_id in [vocab.with_bytes(bytes([byte]))[0] for byte in text.encode()]:
        same(followed, exact, vocab, so_far)
        assert followed.accept([token_id]) == exact.accept([token_id]) == 1, so_far
        so_far.append(token_id)
    same(followed, exact, vocab, so_far)
    assert followed.can_stop


def test_a_users_own_lark_is_not_followed(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.lark('start: A "b"\nA: /a+/\n'))
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    assert grammar.base.automaton is None
    assert grammar.base.follower is None


def engine_class(name: str) -> set[int]:
    """The characters that the engine takes for a class, found along its bytes."""
    vocab = Vocab.of_bytes()
    tokenizer = LLGuidanceEngine(vocab, follow=False)._tokenizer
    start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(name), log_level=0)
    found: set[int] = set()
    waiting = [(start, b"")]
    while waiting:
        matcher, data = waiting.pop()
        if matcher.is_accepting():
            found.add(ord(data.decode()))
            continue
        row = bitmask.empty(vocab.size)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for byte in bitmask.ids(row).tolist():
            after = matcher.deep_copy()
            assert after.try_consume_tokens([byte]) == 1
            waiting.append((after, data + bytes([byte])))
    return found


@pytest.mark.parametrize(("name", "ranges"), [(r"\d", DIGITS), (r"\s", SPACES)])
def test_named_classes_are_those_of_the_engine(name: str, ranges: list[tuple[int, int]]) -> None:
    assert engine_class(name) == {code for first, last in ranges for code in range(first, last + 1)}
