"""Terminals that users write may force text for ever; what is asked of the engine about them has an end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.engines.forcing import is_forced
from sglite.grammar.engines.route import plan
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(isolate=False))
    yield made
    made.close()


ENDLESS = [
    'start: A "ab"\nA: /a+/',
    "start: A B\nA: /a+/\nB: /ab/",
    'start: "x" A "b"\nA: /(ab)+a/',
    '%llguidance {"no_forcing": false}\nstart: A "ab"\nA: /a+/\n%llguidance {"no_forcing": false}',
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ENDLESS)
def test_a_terminal_that_cannot_end_is_written_on_and_holds_nobody_up(compiler: GrammarCompiler, text: str) -> None:
    matcher = compiler.compile_now(spec.lark(text)).matcher()
    row = bitmask.empty(compiler.vocab.size)
    for _ in range(8):
        matcher.fill(row)
        assert not matcher.forced()
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert legal.size
        assert matcher.accept([int(legal[0])]) == 1


@pytest.mark.timeout(60)
def test_an_expression_in_a_tag_that_its_end_cannot_end_holds_nobody_up(compiler: GrammarCompiler) -> None:
    content = {"type": "regex", "pattern": "a+"}
    schema = {"type": "json_schema", "json_schema": {"const": 1}}
    tags = [{"type": "tag", "begin": "<", "content": content, "end": "ab"}, schema]
    matcher = compiler.compile_now(
        spec.structural_tag({"type": "structural_tag", "format": {"type": "sequence", "elements": tags}})
    ).matcher()
    row = bitmask.empty(compiler.vocab.size)
    for _ in range(6):
        matcher.fill(row)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert matcher.accept([int(legal[0])]) == 1


@pytest.mark.parametrize(
    ("made", "forced"),
    [
        (lambda: spec.lark('start: "a"'), False),
        (lambda: spec.regex("a+ab"), True),
        (lambda: spec.json_schema({"const": '%llguidance {"no_forcing": true}'}), True),
        (lambda: spec.choice(["no_forcing", "b"]), True),
    ],
)
def test_only_what_users_write_as_terminals_is_not_forced(made: Callable[[], GrammarSpec], forced: bool) -> None:
    assert is_forced(plan(made()).grammar) is forced


def test_a_tag_with_schemas_alone_is_forced() -> None:
    tag = {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"const": 1}},
        "end": "</a>",
    }
    made = spec.structural_tag(json.dumps({"type": "structural_tag", "format": tag}))
    assert is_forced(plan(made).grammar)
