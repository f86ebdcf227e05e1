"""Sets of strings as terminals: patterns, formats, lengths and excluded strings as one regular expression.

Expressions here are over the spelling between the quotes (pattern_text.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sglite.grammar.schema.cases import Case, TextRule
from sglite.grammar.schema.formats import grammar_pattern
from sglite.grammar.schema.pattern import ANY_CHAR, Repeat
from sglite.grammar.schema.pattern_text import (
    ANY,
    Expression,
    lark_regex,
    length_expression,
    pattern_expression,
    pattern_lengths,
)
from sglite.grammar.schema.regex_format import regex_expression
from sglite.grammar.schema.values import string_text

ANY_STRING = Expression(lark_regex(ANY), Repeat(ANY_CHAR, 0, None))
_REGEX, _STRING = r"/(?:[^/\\]|\\.)+/", r'"(?:[^"\\]|\\.)*"'
_COMPLEMENT = re.compile(rf"~(?:{_REGEX}|{_STRING}|\({_STRING}(?:\|{_STRING})*\))")
MAX_LENGTH = 50_000_000  # beyond, a maxLength is never reached: no context is that long


def content(value: str) -> str:
    """A string's spelling without its quotes."""
    return string_text(value)[1:-1]


def literal(text: str) -> str:
    """A Lark literal; Lark reads JSON escapes, and takes no raw DEL."""
    return string_text(text).replace("\x7f", "\\u007f")


def one_of(values: Iterable[str]) -> Expression:
    """The expression of finitely many strings, as literals: the engine reads one in a third of a regex's time."""
    words = [f'"{value}"' if value.isidentifier() else literal(content(value)) for value in values]
    return Expression(words[0] if len(words) == 1 else f"({'|'.join(words)})", tuple(values))


def rule_expression(rule: TextRule) -> Expression:
    if rule.kind == "format" and rule.text == "regex":
        return regex_expression()
    return pattern_expression(rule.text if rule.kind == "pattern" else grammar_pattern(rule.text))


def _lengths(rule: TextRule) -> tuple[int, int | None]:
    if rule.kind == "format" and rule.text == "regex":
        return 0, None
    return pattern_lengths(rule.text if rule.kind == "pattern" else grammar_pattern(rule.text))


def string_parts(case: Case) -> list[str] | None:
    """Expressions whose intersection are the strings of the case; None where there are plainly none."""
    low, high = case.min_length, case.max_length
    parts: list[str] = []
    for rule in case.texts:
        if not rule.negated:
            least, most = _lengths(rule)
            if (high is not None and least > high) or (most is not None and most < low):
                return None
            low = 0 if least >= low else low
            high = None if high is not None and most is not None and most <= high else high
            parts.append(rule_expression(rule))
    if low or (high is not None and high < MAX_LENGTH):
        parts.append(length_expression(low, high))
    if not parts:
        parts.append(ANY_STRING)
    parts.extend(~rule_expression(rule) for rule in case.texts if rule.negated)
    excluded = [value for value in case.not_values if isinstance(value, str)]
    if excluded:
        parts.append(~one_of(excluded))
    return parts


def meet(parts: Iterable[str]) -> str:
    unique = _one_complement(list(dict.fromkeys(parts)))
    if (
        len(unique) > 1
        and ANY_STRING in unique
        and any(not part.startswith("~") for part in unique if part != ANY_STRING)
    ):
        unique.remove(ANY_STRING)
    return unique[0] if len(unique) == 1 else f"({' & '.join(unique)})"


def _one_complement(parts: list[str]) -> list[str]:
    """What is excluded as one expression: the engine follows one complement where it gives up at five."""
    if len(parts) < 2 or len([part for part in parts if part[:1] == "~"]) < 2:
        return parts
    excluded = [part for part in parts if _COMPLEMENT.fullmatch(part)]
    if len(excluded) < 2:
        return parts
    return [*(part for part in parts if part not in excluded), f"~({'|'.join(part[1:] for part in excluded)})"]


def join(parts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


def quoted(expression: str, *, before: str = "", after: str = "") -> str:
    """The terminal of a whole JSON string around `expression`, with fixed regex text on both sides."""
    if expression.startswith("/") and expression.endswith("/") and expression.count("/") - expression.count(r"\/") == 2:
        return f'/{before}"(?:{expression[1:-1]})"{after}/'
    return f"{lark_regex(before + chr(34))} {expression} {lark_regex(chr(34) + after)}"
