"""How many strings a pattern has, as far as its form tells: enough to know that keys or items never run out."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from sglite.grammar.automaton.classes import complement
from sglite.grammar.schema.cases import Case
from sglite.grammar.schema.formats import grammar_pattern
from sglite.grammar.schema.pattern import (
    MAX_CODE_POINT,
    Alt,
    Cat,
    Chars,
    Pattern,
    Repeat,
    has_look,
    lengths,
    parse,
    split_anchors,
)

MANY = 1 << 40
_ENOUGH = 64  # strings that are written out


@lru_cache(maxsize=4096)
def pattern_is_open(text: str) -> bool:
    """Every beginning of a string in which `text` is found goes on in infinitely many ways. Raises PatternError."""
    tree = parse(text)
    return not has_look(tree) and all(not way.at_end or _ends_open(way.body) for way in split_anchors(tree))


@lru_cache(maxsize=4096)
def others_are_open(text: str) -> bool:
    """Every beginning of a string in which `text` is not found goes on in infinitely many such ways: by characters that
    the pattern does not know. Raises PatternError."""
    tree = parse(text)
    return not has_look(tree) and _knows_its_characters(tree) and lengths(tree)[0] > 0


def _knows_its_characters(tree: Pattern) -> bool:
    """Each character that it matches is named in it, and few are."""
    match tree:
        case Chars(ranges, negated, properties):
            return not negated and not properties and sum(high - low + 1 for low, high in ranges) <= MAX_CODE_POINT // 2
        case Cat(parts):
            return all(map(_knows_its_characters, parts))
        case Alt(options):
            return all(map(_knows_its_characters, options))
        case Repeat(body):
            return _knows_its_characters(body)
    return True


def _ends_open(tree: Pattern) -> bool:
    """A match can always be made longer."""
    match tree:
        case Repeat(body, _, None):
            return lengths(body)[0] > 0
        case Cat(parts) if parts:
            return _ends_open(parts[-1])
        case Alt(options):
            return all(_ends_open(option) for option in options)
    return False


@lru_cache(maxsize=4096)
def pattern_count(text: str) -> int:
    """At least so many strings match, at most MANY. Raises PatternError."""
    tree = parse(text)
    if has_look(tree):
        return 0
    ways = split_anchors(tree)
    if any(not (way.at_start and way.at_end) for way in ways):
        return MANY
    some = set().union(*(_some_words(way.body) for way in ways))
    return max(len(some), *(_count(way.body) for way in ways)) if ways else 0


def _some_words(tree: Pattern) -> set[str]:
    """Up to _ENOUGH of the strings, none for a tree whose strings are long."""
    if lengths(tree)[0] > _ENOUGH:
        return set()
    match tree:
        case Chars(ranges, negated, properties):
            if properties:
                return set()
            kept = complement(ranges) if negated else _merged(ranges)
            return {chr(code) for low, high in kept for code in range(low, min(high, low + _ENOUGH) + 1)}
        case Cat(parts):
            found = {""}
            for part in parts:
                found = _products(found, _some_words(part))
            return found
        case Alt(options):
            return set().union(*map(_some_words, options))
        case Repeat(body, least, most):
            words = _some_words(body)
            found, longer = set(), {""}
            if least > _ENOUGH:
                return found
            for count in range(min(least + _ENOUGH, least + 1 if most is None else most) + 1):
                found |= longer if count >= least else set()
                longer = _products(longer, words)
                if len(found) >= _ENOUGH:
                    break
            return found
    return set()


def _products(first: set[str], second: set[str]) -> set[str]:
    return set(islice((a + b for a in sorted(first) for b in sorted(second)), _ENOUGH))


def _count(tree: Pattern) -> int:
    match tree:
        case Chars(ranges, negated, properties):
            if properties:
                return 1
            kept = complement(ranges) if negated else _merged(ranges)
            return sum(high - low + 1 for low, high in kept)
        case Cat(parts):
            return max((_count(part) for part in parts), default=1)
        case Alt(options):
            return max(_count(option) for option in options)
        case Repeat(body, least, most):
            if most == 0 or lengths(body)[1] == 0:
                return 1
            return MANY if most is None else max(most - least + 1, _count(body))
    return 1


def _merged(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return complement(complement(ranges))


def strings_are_open(case: Case) -> bool:
    """Every beginning of a string of the case goes on in infinitely many ways."""
    if [(rule.kind, rule.negated) for rule in case.texts] == [("pattern", True)]:
        return case.max_length is None and others_are_open(case.texts[0].text)
    patterns = _patterns(case)
    return patterns is not None and case.max_length is None and all(map(pattern_is_open, patterns[:1]))


def string_count(case: Case) -> int:
    """At least so many strings are in the case, at most MANY."""
    patterns = _patterns(case)
    if patterns is None:
        return 0
    excluded = sum(isinstance(value, str) for value in case.not_values)
    if patterns:
        alone = case.min_length == 0 and case.max_length is None
        return max(0, pattern_count(patterns[0]) - excluded) if alone else 0
    longest = case.min_length + 8 if case.max_length is None else case.max_length
    return max(0, min(MANY, MAX_CODE_POINT // 2 if longest else 1) - excluded)


def _patterns(case: Case) -> list[str] | None:
    """The one pattern of the case, if it has one; None where several things narrow its strings."""
    if len(case.texts) > 1 or any(rule.negated for rule in case.texts):
        return None
    return [rule.text if rule.kind == "pattern" else grammar_pattern(rule.text) for rule in case.texts]
