"""Which keys the objects of a case may have: those that the schema names, in order, and classes of all others by the
patterns that they match."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING

import msgspec

from sglite.grammar.schema.cases import STRING, Case, Conjunction, SomeKey
from sglite.grammar.schema.emptiness import some_texts
from sglite.grammar.schema.openness import (
    others_are_open,
    pattern_count,
    pattern_is_open,
    string_count,
    strings_are_open,
)
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.pattern_text import found_in, pattern_expression
from sglite.grammar.schema.presence import names_in
from sglite.grammar.schema.strings import ANY_STRING, join, meet, one_of, string_parts
from sglite.grammar.schema.values import encodable

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

MAX_CLASSES = 64
MAX_LISTED = 24  # undeclared names that are told apart one by one


class NamedKey(msgspec.Struct, frozen=True):
    name: str
    literals: Conjunction
    witness: tuple[tuple[frozenset[int], Conjunction], ...]  # which some_keys it satisfies with which value


class KeyClass(msgspec.Struct, frozen=True):
    """Unnamed keys with one rule. `expression`: their spelling between the quotes."""

    expression: str
    literals: Conjunction
    satisfies: frozenset[int] = frozenset()  # some_keys that such a key with such a value satisfies


class Classes(msgspec.Struct, frozen=True):
    """All unnamed keys of a case."""

    kinds: list[KeyClass]
    run_out: tuple[str, ...] = ()  # patterns of keys some beginning of which has only finitely many ways to go on
    at_least: int = 0  # so many different ones exist, where they run out
    witnesses_run_out: bool = False


def takes_any_further_key(emitter: Emitter, case: Case) -> bool:
    """Proven: wherever an object of the case is about to end, it can go on with infinitely many other keys."""
    if case.max_keys is not None or case.some_keys:
        return False
    found = classes_of(emitter, case, key_order(case))
    return bool(found.kinds) and not found.run_out


def all_keys(emitter: Emitter, case: Case) -> list[str] | None:
    """The keys of the case's objects in order; None where others than named ones are possible."""
    names = key_order(case)
    return None if classes_of(emitter, case, names).kinds else [name for name in names if name not in case.absent]


def list_names(case: Case, found: Classes) -> None:
    """Where some key must be there, or a number of them, and only few names will do: tell these apart, so that none of
    them is taken by a key that leaves the object without a way to its end."""
    names: dict[str, None] = {}
    for kind in found.kinds:
        texts = some_texts(kind.expression, MAX_LISTED)
        if texts is not None and len(texts) <= MAX_LISTED:
            names.update((json.loads(b'"' + name + b'"'), None) for name in texts)
        elif not case.some_keys:
            return
    if len(names) <= MAX_LISTED:
        case.listed = tuple(sorted(names))


def key_order(case: Case) -> list[str]:
    """All keys that the case names: those of `properties` first, then those that are only asked for or forbidden."""
    order: dict[str, None] = {}
    for rule in case.keys:
        order |= dict.fromkeys(rule.named)
    order |= case.required
    if case.presence is not True or case.absent or case.listed:
        order |= dict.fromkeys(chain(sorted(names_in(case.presence)), sorted(case.absent), case.listed or ()))
    return list(order)


def named_key(emitter: Emitter, case: Case, name: str) -> NamedKey | None:
    """None where the key cannot be there."""
    if not encodable(name) or (case.key_names and not all(_name_holds(emitter, n, name) for n in case.key_names)):
        return None
    literals = case.key_literals(name)
    if literals and emitter.expander.is_hopeless(literals):
        return None
    if not case.some_keys:
        return NamedKey(name, literals, ())
    possible = [i for i, rule in enumerate(case.some_keys) if _is_witness_name(emitter, rule, name)]
    witness = []
    for group in _groups(possible):
        values = [value for i in sorted(group) if (value := case.some_keys[i].value) is not None]
        witness.append((group, tuple(dict.fromkeys((*literals, *values)))))
    return NamedKey(name, literals, tuple(witness))


def _is_witness_name(emitter: Emitter, rule: SomeKey, name: str) -> bool:
    fits = name not in rule.named and not any(found_in(pattern, name) for pattern in rule.not_matching)
    fits = fits and (rule.pattern is None or found_in(rule.pattern, name))
    return fits and (rule.name is None or _name_holds(emitter, rule.name, name))


def _name_holds(emitter: Emitter, literal: int, name: str) -> bool:
    try:
        return emitter.expander.evaluator.is_valid(max(literal, ~literal), name) == (literal >= 0)
    except PatternError:
        return True  # a gap, told of where the names' own rules are built


# --- unnamed keys


def classes_of(emitter: Emitter, case: Case, names: list[str]) -> Classes:
    """A partition of the unnamed keys, classes with equal rules united, classes without any value left out."""
    patterns = list(dict.fromkeys([pattern for rule in case.keys for pattern, _ in rule.patterns]))
    if not patterns and not case.key_names and not case.some_keys and case.listed is None:
        literals = _class_literals(case, frozenset())
        if literals and emitter.expander.is_hopeless(literals):
            return Classes([], at_least=-len(names))
        return Classes([KeyClass(meet([ANY_STRING, *_outside(names)]), literals)], at_least=-len(names))
    bases = _allowed_names(emitter, case)
    outside = _outside(names)
    by_rule: dict[Conjunction, list[str]] = {}
    left_out: list[frozenset[str]] = []
    for base in bases:
        partition = _partition(emitter, patterns, [*base, *outside])
        if partition is None:
            emitter.leave_out(case, "patternProperties", f"its patterns overlap in more than {MAX_CLASSES} ways")
            return Classes([KeyClass(meet([*base, *outside]), ())], run_out=() if bases == _ANY_NAME else ("",))
        for matched, parts in partition:
            literals = _class_literals(case, matched)
            if literals and emitter.expander.is_hopeless(literals):
                left_out.append(matched)
            else:
                by_rule.setdefault(literals, []).append(meet(parts))
    if len(bases) == len(by_rule) == 1 and not left_out:  # all have one rule: no pattern decides anything
        by_rule = {literals: [meet([*bases[0], *outside])] for literals in by_rule}
    found = [KeyClass(join(expressions), literals) for literals, expressions in by_rule.items()]
    witnesses = [
        kind
        for group in _groups(list(range(len(case.some_keys))))
        for kind in _witness_classes(emitter, case, group, patterns, bases, outside)
    ]
    if case.listed is not None:  # what is left of a class may be nothing
        found, witnesses = ([k for k in kinds if some_texts(k.expression, 0) != ()] for kinds in (found, witnesses))
    asked_for = {i for kind in witnesses for i in kind.satisfies}
    open_witnesses = _all_but_few_names(emitter, case) and all(
        _is_open_witness(emitter, case.some_keys[i]) for i in asked_for
    )
    return Classes(
        found + witnesses,
        run_out=_running_out(emitter, case, patterns, left_out),
        at_least=0 if set(left_out) - {frozenset()} else _num_names(emitter, case, patterns) - len(names),
        witnesses_run_out=bool(witnesses) and not open_witnesses,
    )


def _outside(names: list[str]) -> list[str]:
    """The expression of all texts but these names; none where there are none."""
    return [~one_of(sorted([name for name in names if encodable(name)]))] if names else []


def _running_out(emitter: Emitter, case: Case, patterns: list[str], left_out: list[frozenset[str]]) -> tuple[str, ...]:
    """Patterns of the keys some beginning of which has only finitely many ways to go on.

    `left_out`: the sets of patterns such that no key may match just them.
    """
    if not left_out and (not case.key_names or _names_are_open(emitter, case)):
        return ()
    if not case.key_names and set(left_out) == {frozenset()}:  # all that matches some pattern, and nothing else
        return tuple(pattern for pattern in patterns if not pattern_is_open(pattern))
    return ("",)


def _names_are_open(emitter: Emitter, case: Case) -> bool:
    return len(case.key_names) == 1 and all(map(_is_open, emitter.cases(case.key_names)))


def _num_names(emitter: Emitter, case: Case, patterns: list[str]) -> int:
    """At least so many different keys are possible, where that is easily seen."""
    if not case.key_names:
        return max(map(pattern_count, patterns), default=0)
    if patterns or len(case.key_names) > 1:
        return 0
    found = emitter.cases(case.key_names)
    return min((string_count(c) if c.values is None else len(c.values) for c in found), default=0)


def _all_but_few_names(emitter: Emitter, case: Case) -> bool:
    """Names are all strings of some length or more, but for finitely many."""
    cases = [c for literal in case.key_names for c in emitter.cases((literal,)) if c.types & STRING]
    return all(c.values is None and not c.texts and c.max_length is None for c in cases)


_ANY_NAME = [[ANY_STRING]]


def _is_open_witness(emitter: Emitter, rule: SomeKey) -> bool:
    """Every beginning of a key's name that can break the rule goes on in infinitely many ways."""
    if rule.not_matching:
        return rule.name is None and rule.pattern is None and all(map(others_are_open, rule.not_matching))
    if rule.name is not None and emitter.expander.canonical((rule.name,)):
        names = emitter.cases((rule.name,))
        return rule.pattern is None and all(c.types & STRING == 0 or _is_open(c) for c in names)
    return rule.pattern is None or pattern_is_open(rule.pattern)


def _is_open(case: Case) -> bool:
    return case.values is None and strings_are_open(case)


def _class_literals(case: Case, matched: frozenset[str]) -> Conjunction:
    found: dict[int, None] = {}
    for rule in case.keys:
        hits = [literal for pattern, literal in rule.patterns if pattern in matched]
        for literal in hits or ([] if rule.rest is None else [rule.rest]):
            found[literal] = None
    return tuple(found)


def _allowed_names(emitter: Emitter, case: Case) -> list[list[str]]:
    """Expressions of the key texts that propertyNames allows, as a union of intersections."""
    return _names_of(emitter, case.key_names)


def _names_of(emitter: Emitter, literals: Conjunction) -> list[list[str]]:
    if not literals:
        return [[ANY_STRING]]
    bases: list[list[str]] = []
    for case in emitter.cases(literals):
        for gap in case.gaps:
            emitter.on_gap(gap)
        if case.values is not None:
            texts = [value for value in case.values if isinstance(value, str) and encodable(value)]
            bases.extend([[one_of(texts)]] if texts else [])
        elif case.types & 16:
            parts = string_parts(case)
            bases.extend([] if parts is None or emitter.is_empty(parts) else [parts])
    return bases


def _partition(emitter: Emitter, patterns: list[str], base: list[str]) -> list[tuple[frozenset[str], list[str]]] | None:
    """The key texts of `base` by the set of patterns that they match; None where there are too many such sets."""
    classes: list[tuple[frozenset[str], list[str]]] = [(frozenset(), base)]
    expressions = [pattern_expression(pattern) for pattern in patterns]
    told = emitter.languages.told_apart(base, expressions) if len(patterns) > 1 else None
    for i, (pattern, expression) in enumerate(zip(patterns, expressions, strict=True)):
        there = None if told is None else {frozenset(patterns[j] for j in one if j <= i) for one in told}
        split = []
        for matched, parts in classes:
            for side in ((matched | {pattern}, [*parts, expression]), (matched, [*parts, ~expression])):
                # An empty class does no harm; testing for it only keeps many patterns from multiplying.
                if side[0] in there if there is not None else len(patterns) == 1 or not emitter.is_empty(side[1]):
                    split.append(side)
        classes = split
        if len(classes) > MAX_CLASSES:
            return None
    return classes


def _witness_classes(
    emitter: Emitter,
    case: Case,
    group: frozenset[int],
    patterns: list[str],
    bases: list[list[str]],
    outside: Sequence[str],
) -> list[KeyClass]:
    """Unnamed keys each of which satisfies all "at least one key such that" of `group`."""
    narrow: list[str] = []
    names: list[int] = []
    values: list[int] = []
    for i in sorted(group):
        rule = case.some_keys[i]
        narrow += [~one_of(sorted(rule.named))] if rule.named else []
        narrow += [~pattern_expression(pattern) for pattern in rule.not_matching]
        narrow += [pattern_expression(rule.pattern)] if rule.pattern is not None else []
        names += [rule.name] if rule.name is not None else []
        values += [rule.value] if rule.value is not None else []
    found = []
    for base in bases:
        for name in _names_of(emitter, tuple(names)) if names else [[]]:
            for matched, parts in _partition(emitter, patterns, [*base, *name, *outside, *narrow]) or ():
                literals = tuple(dict.fromkeys((*_class_literals(case, matched), *values)))
                if not emitter.is_empty(parts) and not emitter.expander.is_hopeless(literals):
                    found.append(KeyClass(meet(parts), literals, group))
    return found


def _groups(items: list[int]) -> list[frozenset[int]]:
    """All non-empty subsets."""
    return [frozenset(group) for size in range(1, len(items) + 1) for group in combinations(items, size)]
