"""Tokens that are certain because of what the grammar allows behind them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, Grammar, GrammarCompiler
from sglite.grammar.engines.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from sglite.grammar.vocab import Vocab
from tests.grammar.automaton import test_followed
from tests.grammar.automaton.test_followed import SCHEMAS, closed, odd_first, text

compiler = test_followed.compiler

_PIECES = ['":', '":"', '"D', '"F', "DE", "FR", '","', '"}', '{"', "kind", "name", '":-', ":1"]


def vocab_of(splits: dict[str, list[str]]) -> Vocab:
    """All bytes and some pieces, longest first but for the texts that begin like one of `splits`."""
    texts = [bytes([i]) for i in range(256)] + [piece.encode() for piece in _PIECES]
    by_text = {text: i for i, text in enumerate(texts)}

    def encode(given: str) -> list[int]:
        data, at, found = given.encode(), 0, []
        while at < len(data):
            begun = next((split for start, split in splits.items() if data[at:].startswith(start.encode())), None)
            if begun is not None:
                found += [by_text[piece.encode()] for piece in begun]
                at += sum(map(len, begun))
                continue
            size = next(n for n in range(min(8, len(data) - at), 0, -1) if data[at : at + n] in by_text)
            found.append(by_text[data[at : at + size]])
            at += size
        return found

    return Vocab(tokens=(*texts, b""), names=(*[b""] * len(texts), b"<end>"), stop_ids=(len(texts),), encode=encode)


def exact(compiler: GrammarCompiler, schema: dict[str, Any]) -> LLGuidanceMatcher:
    grammar = compiler.compile_now(spec.json_schema(schema))
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    return grammar.base.exact_matcher()


def forced_at_start(splits: dict[str, list[str]], schema: dict[str, Any]) -> str:
    vocab = vocab_of(splits)
    compiler = GrammarCompiler(vocab, CompilerConfig(isolate=False))
    matcher = exact(compiler, schema)
    found = matcher.forced()
    assert matcher.forced() == found  # it stays where it is
    compiler.close()
    return "|".join(vocab.tokens[i].decode() for i in found)


_CHOICE = closed(kind={"enum": ["DE", "FR"]})


def test_a_token_that_nothing_legal_joins_is_certain() -> None:
    assert forced_at_start({}, _CHOICE) == '{"|kind|":"'
    natural = closed(kind={"type": "integer", "minimum": 0})
    assert forced_at_start({}, natural) == '{"|kind|":'  # though `:1` is a token


def test_a_token_that_the_tokenizer_splits_otherwise_is_not() -> None:
    assert forced_at_start({'":"D': ['":', '"D']}, _CHOICE) == '{"|kind'
    assert forced_at_start({'":"F': ['":', '"F']}, _CHOICE) == '{"|kind'


def test_a_token_that_may_go_on_is_not() -> None:
    assert forced_at_start({}, closed(kind=text(5))) == '{"|kind'  # `":"` and then `","`, for one
    assert forced_at_start({}, closed(kind={"type": "integer"})) == '{"|kind'  # `":-`


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_forced_is_all_that_the_masks_allow(compiler: GrammarCompiler, name: str) -> None:
    vocab, rng, forced = compiler.vocab, random.Random(3), 0
    for _ in range(8):
        matcher, walked = exact(compiler, SCHEMAS[name]), 0
        row = bitmask.empty(vocab.size)
        while not matcher.finished and walked < 60:
            run = matcher.forced()
            for token_id in run:
                matcher.fill(row)
                assert bitmask.ids(row).tolist() == [token_id]
                assert matcher.accept((token_id,)) == 1
            walked, forced = walked + 1, forced + len(run)
            if run:
                assert matcher.forced() == []
                continue
            matcher.fill(row)
            assert matcher.accept((odd_first(rng, bitmask.ids(row).tolist(), vocab),)) == 1
    assert forced or name in ("free strings", "any", "open")
