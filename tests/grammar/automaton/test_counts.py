"""Counts that no token can tell apart share what an engine said; counts near their bounds do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglite.grammar.automaton.counts import Counts, least_bytes
from sglite.grammar.automaton.lark import Group, read
from sglite.grammar.automaton.positions import Machine
from sglite.grammar.automaton.regex import Regexes
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from tests.grammar.automaton.test_followed import both, closed, text, tricky_vocab, walk


def group(least: int, most: int | None, item: str = "abc") -> Group:
    return Group(((Regexes(100).text(item.encode()),),), least, most)


@pytest.mark.parametrize(
    ("body", "count", "usual"),
    [
        (group(64, None), 0, 0),
        (group(64, None), 58, 0),  # ten bytes begin at most 3 more items of three bytes, and one is begun
        (group(64, None), 59, 59),
        (group(64, None), 64, 64),
        (group(2, 64), 1, 1),
        (group(2, 64), 2, 2),
        (group(2, 64), 58, 2),
        (group(2, 64), 59, 59),
        (group(64, None, item=""), 40, 0),  # items without a byte: as many as the token has bytes
        (group(64, None, item=""), 52, 52),
    ],
)
def test_a_count_far_from_its_bounds_is_stood_for_by_one(body: Group, count: int, usual: int) -> None:
    assert Counts({}, reach=10).usual(body, count) == usual


@pytest.mark.parametrize(
    ("pattern", "least"),
    [("abc", 3), ("a|bc", 1), ("(?:ab){3,5}c*", 6), ("é", 2), ("a?", 0), ("[a-z]{2,}|日本", 2)],
)
def test_the_shortest_text_of_an_expression_is_not_shorter(pattern: str, least: int) -> None:
    assert least_bytes(Regexes(1000).parse(pattern), {}) == least


def test_a_rule_within_itself_has_no_fewer_bytes_than_none() -> None:
    lark = 'start: ("," a){9,}\na: "x" | "[" a "]"\n'
    machine = Machine(lark, most_regexes=(1000, 1000), most_positions=1000, reach=8)
    early, late = (machine.follow(machine.start, b",x" * n) for n in (1, 2))
    assert early is not None
    assert late is not None
    assert machine.usual(early) == machine.usual(late)
    end = machine.follow(machine.start, b",x" * 8)
    assert end is not None
    assert machine.usual(end) != machine.usual(early)


COUNTED: dict[str, dict[str, Any]] = {
    "least": {"type": "array", "minItems": 40, "items": closed(name=text(2))},
    "most": {"type": "array", "maxItems": 30, "items": closed(name=text(2))},
    "both": {"type": "array", "minItems": 3, "maxItems": 9, "items": {"type": "integer", "maximum": 9, "minimum": 0}},
    "within each other": {
        "type": "array",
        "minItems": 12,
        "items": {"type": "array", "minItems": 12, "items": {"enum": ["left", "right"]}},
    },
    "alternatives": {
        "anyOf": [
            {"type": "array", "minItems": 20, "items": text(3)},
            {"type": "array", "minItems": 10, "items": {"type": "boolean"}},
        ]
    },
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))


@pytest.mark.parametrize("name", COUNTED)
def test_long_walks_over_counts_are_those_of_the_engine(compiler: GrammarCompiler, name: str) -> None:
    vocab = compiler.vocab
    for seed in range(3):
        rng = random.Random(f"{name}/{seed}")
        followed, exact = both(compiler, COUNTED[name])
        walk(followed, exact, vocab, rng, 400)


def test_one_mask_serves_all_items_of_a_long_array(compiler: GrammarCompiler) -> None:
    followed, _ = both(compiler, COUNTED["least"])
    vocab = compiler.vocab
    places = []
    for number in range(30):
        followed.accept(vocab.encode('{"name":"' if number else '[{"name":"'))
        assert followed.state is not None
        places.append(followed.state)
        followed.accept(vocab.encode('a"},'))
    assert len({id(place) for place in places}) == 30
    assert len({id(place.said) for place in places[1:25]}) == 1  # the first stands before the repeat


def test_counts_in_terminals_are_read():
    regexes = Regexes(1000)
    rules = read('start: T0\nT0: /"/ (T0S0|"b" /c/)* "d"{2,3} /e/?\nT0S0: /a+/\n', regexes)
    assert rules["start"] == ((regexes.parse('"(?:a+|bc)*d{2,3}e?'),),)
