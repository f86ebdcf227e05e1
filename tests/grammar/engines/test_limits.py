"""Limits of the engine show when a grammar is compiled, not in the middle of a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from sglite.errors import GrammarTooLarge
from sglite.grammar import bitmask, spec
from sglite.grammar.engines import route
from sglite.grammar.engines.llguidance import LLGuidanceEngine, LLGuidanceGrammar
from sglite.grammar.vocab import Vocab


def _compiled(schema: dict[str, Any], **limits: int) -> LLGuidanceGrammar:
    given = spec.json_schema(schema)
    few = [llguidance.LLParserLimits(**limits)] if limits else []
    return LLGuidanceEngine(Vocab.of_bytes(), *few, follow=False).compile(given, route.plan(given).grammar)


@pytest.mark.parametrize("around", [lambda s: s, lambda s: {"type": "object", "properties": {"a": s}}])
def test_a_string_that_the_engine_could_not_follow_is_refused(around: Callable[[Any], Any]) -> None:
    schema = {
        "type": "string",
        "minLength": 10,
        "maxLength": 900,
        "pattern": "[aA][12].*[zZ]",
        "not": {"pattern": "a1"},
    }
    assert _compiled(around(schema))
    with pytest.raises(GrammarTooLarge, match="too many expressions"):
        _compiled(around(schema), step_lexer_fuel=500)


@pytest.mark.parametrize(
    "pattern", [r"^(?!.*foo).*$", r"^(?!\s*$).+", r"^(?:\S+\s+){0,49}\S+$", r"^[^<>]*[^<>\s][^<>]*$"]
)
def test_a_bounded_string_with_a_pattern_is_followed(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"pattern": pattern, "maxLength": 1000}}}
    grammar = _compiled({**schema, "required": ["a", "b"], "additionalProperties": False})
    matcher = grammar.matcher()
    row = bitmask.empty(grammar.vocab.size)
    for byte in b'{"a":"x","b":"some words of a summary, and more of them"}':
        matcher.fill(row)
        assert matcher.accept([byte]) == 1
    assert matcher.can_stop


def test_words_that_a_bounded_string_must_not_hold_are_one_complement() -> None:
    words = ("foo", "bar", "baz", "qux", "quux")
    schema = {"type": "string", "minLength": 5, "maxLength": 400, "allOf": [{"not": {"pattern": w}} for w in words]}
    matcher = _compiled(schema).matcher()
    assert matcher.accept(list(b'"a long quu')) == 11
    assert matcher.accept(list(b"x")) == 0
    assert matcher.accept(list(b'"')) == 1
