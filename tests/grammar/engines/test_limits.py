"""Limits of the engine show when a grammar is compiled, not in the middle of a value."""

from __future__ import annotations

from typing import Any

import pytest

from sglite.errors import GrammarTooLarge
from sglite.grammar import bitmask, spec
from sglite.grammar.engines import route
from sglite.grammar.engines.llguidance import LLGuidanceEngine, LLGuidanceGrammar
from sglite.grammar.vocab import Vocab


def _compiled(schema: dict[str, Any]) -> LLGuidanceGrammar:
    given = spec.json_schema(schema)
    return LLGuidanceEngine(Vocab.of_bytes(), follow=False).compile(given, route.plan(given).grammar)


def test_a_string_that_the_engine_could_not_follow_is_refused() -> None:
    excluded = [{"not": {"pattern": p}} for p in ("ab1", "b12", r"\d\d", "[a|b]", "1.*2", "ac")]
    schema = {"type": "string", "minLength": 10, "maxLength": 90, "pattern": "[aA][12].*[zZ]", "allOf": excluded}
    with pytest.raises(GrammarTooLarge, match="too many expressions"):
        _compiled(schema)


def test_counted_words_within_a_bounded_string_are_followed() -> None:
    pattern = r"^(?:\S+\s+){0,49}\S+$"
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"pattern": pattern, "maxLength": 500}}}
    grammar = _compiled({**schema, "required": ["a", "b"], "additionalProperties": False})
    matcher = grammar.matcher()
    row = bitmask.empty(grammar.vocab.size)
    for byte in b'{"a":"x","b":"some words of a summary, and more of them"}':
        matcher.fill(row)
        assert matcher.accept([byte]) == 1
    assert matcher.can_stop
