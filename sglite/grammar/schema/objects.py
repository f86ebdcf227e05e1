"""Objects of a case: the named keys in schema order, each at most once, then all others.

The rules form an automaton over the named keys. Its state is the next key, whether a comma is due, how many
keys there are (where min/maxProperties ask), which "at least one key such that" are satisfied, and what is
left of the presence formula. Behind the last named key come keys that the schema does not name: they fall
into classes by the patterns that they match.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING

import msgspec

from sglite.grammar.schema.cases import STRING, Case, Conjunction, SomeKey
from sglite.grammar.schema.emptiness import some_texts
from sglite.grammar.schema.grammar import Repeat, Rule, Symbol, Terminal
from sglite.grammar.schema.openness import (
    others_are_open,
    pattern_count,
    pattern_is_open,
    string_count,
    strings_are_open,
)
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.pattern_text import found_in, pattern_expression
from sglite.grammar.schema.presence import Formula, assign, names_in
from sglite.grammar.schema.strings import ANY_STRING, join, meet, one_of, string_parts
from sglite.grammar.schema.values import encodable

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

OPEN, CLOSE = Terminal('"{"'), Terminal('"}"')
MAX_CLASSES = 64
MAX_SOME_KEYS = 4
MAX_STATES = 4000
MAX_LISTED = 24  # undeclared names that are told apart one by one
MAX_SOUGHT = 64  # names that are looked for, to see that there are as many
MAX_COUNTED = 1000  # states with a count each; beyond, the count is a parameter


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


class _State(msgspec.Struct, frozen=True):
    index: int
    first: bool
    count: int
    witnessed: frozenset[int]
    presence: Formula


def emit_object(emitter: Emitter, rule: Rule, case: Case) -> None:
    if len(case.some_keys) > MAX_SOME_KEYS:
        emitter.leave_out(case, "not", f"more than {MAX_SOME_KEYS} rules that some key must break")
        case = case.copy()
        case.some_keys = ()
    names = key_order(case)
    found = _classes(emitter, case, names)
    if case.listed is None and (found.witnesses_run_out or _may_lack_keys(case, found)):
        _list_names(case, found)
        names = key_order(case)
        found = _classes(emitter, case, names)
    named = [key for name in names if name not in case.absent and (key := _named_key(emitter, case, name)) is not None]
    classes = found.kinds
    there = {key.name for key in named}
    presence = case.presence
    for name in names_in(presence) - there:
        presence = assign(presence, name, False)
    if presence is False or not case.required.keys() <= there:
        return
    if classes and (case.max_keys is None or case.max_keys > 1):
        _follow_free_keys(emitter, case, found)
    counting = case.max_keys is not None or case.min_keys > len(case.required)
    if presence is True and not counting and not case.some_keys:
        _emit_free(emitter, rule, named, case.required, classes)
    elif presence is True and not case.some_keys and len(named) * _cap(case) > MAX_COUNTED:
        _emit_counted(emitter, rule, case, named, classes)
    else:
        start = _Automaton(emitter, case, named, classes).start(presence)
        if start is not None:
            emitter.grammar.add(rule, OPEN, start)
            return
        emitter.leave_out(case, "required", "its keys depend on each other in too many ways")
        _emit_free(emitter, rule, named, case.required, classes)


def takes_any_further_key(emitter: Emitter, case: Case) -> bool:
    """Proven: wherever an object of the case is about to end, it can go on with infinitely many other keys."""
    if case.max_keys is not None or case.some_keys:
        return False
    found = _classes(emitter, case, key_order(case))
    return bool(found.kinds) and not found.run_out


def all_keys(emitter: Emitter, case: Case) -> list[str] | None:
    """The keys of the case's objects in order; None where others than named ones are possible."""
    names = key_order(case)
    return None if _classes(emitter, case, names).kinds else [name for name in names if name not in case.absent]


def _list_names(case: Case, found: Classes) -> None:
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


def _follow_free_keys(emitter: Emitter, case: Case, found: Classes) -> None:
    """Unnamed keys are kept apart while the object is written: say so, and see that enough of them exist."""
    wanted = case.min_keys - len(case.required)
    if _may_lack_keys(case, found):
        emitter.leave_out(case, "minProperties", f"it is not proven that {wanted} different further keys exist")
    if found.witnesses_run_out:
        emitter.leave_out(case, "not", "the keys that may break it can all be taken by others")
    emitter.take_free_keys(run_out=found.run_out, counted=wanted > 1)


def _may_lack_keys(case: Case, found: Classes) -> bool:
    """It is not proven that as many different undeclared keys exist as may be asked for."""
    wanted = case.min_keys - len(case.required)
    if not found.run_out or wanted < 2 or found.at_least >= wanted:
        return False
    texts = [some_texts(kind.expression, min(wanted, MAX_SOUGHT)) for kind in found.kinds if not kind.satisfies]
    return sum(len(each) for each in texts if each is not None) < wanted


def _cap(case: Case) -> int:
    """Counts of keys from here on are all the same."""
    return case.min_keys if case.max_keys is None else case.max_keys + 1


def key_order(case: Case) -> list[str]:
    """All keys that the case names: those of `properties` first, then those that are only asked for or forbidden."""
    order: dict[str, None] = {}
    for rule in case.keys:
        order |= dict.fromkeys(rule.named)
    order |= case.required
    if case.presence is not True or case.absent or case.listed:
        order |= dict.fromkeys(chain(sorted(names_in(case.presence)), sorted(case.absent), case.listed or ()))
    return list(order)


def _named_key(emitter: Emitter, case: Case, name: str) -> NamedKey | None:
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


def _classes(emitter: Emitter, case: Case, names: list[str]) -> Classes:
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


# --- keys that are independent of each other


def _emit_free(
    emitter: Emitter, rule: Rule, named: list[NamedKey], required: dict[str, None], classes: list[KeyClass]
) -> None:
    """Optional keys before the first required one as a left-recursive list, all after it as one sequence.

    A parser row then holds few items, and the end of the object completes at once, however many keys there were.
    Lists that begin with the same keys and values share their beginning.
    """
    grammar, add = emitter.grammar, emitter.grammar.add
    where = next((i for i, key in enumerate(named) if key.name in required), len(named))
    begun: Rule | None = None  # at least one of the optional keys so far, the last of them just ended
    for i, key in enumerate(named[:where]):
        value = emitter.key_value(key.name, key.literals)
        begun = _one_more(emitter, begun, key.name, value, shared=not classes or i < len(named) - 1)
    end: list[Symbol] = []
    for key in named[where + 1 :]:
        pair = (emitter.key(key.name, first=False), emitter.key_value(key.name, key.literals))
        end.extend(pair if key.name in required else [Repeat(pair, 0, 1)])
    end.extend([Repeat((_any_of(emitter, classes, first=False),), 0, None)] if classes else [])
    end.append(CLOSE)
    if where < len(named):
        key = named[where]
        rest = grammar.new_rule()
        add(rest, emitter.key_value(key.name, key.literals), *end)
        add(rule, OPEN, emitter.key(key.name, first=True), rest)
        if begun is not None:
            add(rule, OPEN, begun, emitter.key(key.name, first=False), rest)
        return
    add(rule, OPEN, CLOSE)
    if classes:
        begun = grammar.new_rule() if begun is None else begun
        _add_any(emitter, begun, classes, first=True)
    if begun is not None:
        add(rule, OPEN, begun, *end)


def _one_more(emitter: Emitter, before: Rule | None, name: str, value: Rule, *, shared: bool) -> Rule:
    """At least one of the keys of `before` and a further one."""
    link = (-1 if before is None else before.number, name, value.number)
    found = emitter.begun.get(link) if shared else None
    if found is not None:
        return found
    rule, add = emitter.grammar.new_rule(), emitter.grammar.add
    add(rule, emitter.key(name, first=True), value)
    if before is not None:
        add(rule, before, emitter.key(name, first=False), value)
        add(rule, before)
    if shared:
        emitter.begun[link] = rule
    return rule


def _any_of(emitter: Emitter, classes: list[KeyClass], *, first: bool) -> Rule:
    """One unnamed key with its value."""
    rule = emitter.grammar.new_rule()
    _add_any(emitter, rule, classes, first=first)
    return rule


def _add_any(emitter: Emitter, rule: Rule, classes: list[KeyClass], *, first: bool) -> None:
    for kind in classes:
        key = emitter.free_key(kind.expression, first=first)
        emitter.grammar.add(rule, key, emitter.key_value(None, kind.literals))


def _emit_counted(emitter: Emitter, rule: Rule, case: Case, named: list[NamedKey], classes: list[KeyClass]) -> None:
    """Independent keys, counted in the parameter of the rules: for counts that are too large to spell out.

    The engine does not look ahead over conditions: a key may be taken only if the required ones behind it still fit,
    and left out only if those behind it still suffice.
    """
    if not classes and len(named) < case.min_keys:
        return
    grammar = emitter.grammar
    bits = f"[0:{_cap(case).bit_length() + 1}]"
    more = f"incr({bits})"
    begin, going = grammar.new_rule(parametric=True), grammar.new_rule(parametric=True)
    grammar.add(rule, OPEN, Rule(begin.number, "0x0"))
    required_left = sum(key.name in case.required for key in named)
    for left, key in zip(range(len(named) - 1, -1, -1), named, strict=True):
        value = emitter.key_value(key.name, key.literals)
        after, skipped = grammar.new_rule(parametric=True), grammar.new_rule(parametric=True)
        required_left -= key.name in case.required
        if case.max_keys is None or required_left < case.max_keys:
            room = _room(bits, case, required_left)
            grammar.add(begin, emitter.key(key.name, first=True), value, Rule(after.number, more), condition=room)
            grammar.add(going, emitter.key(key.name, first=False), value, Rule(after.number, more), condition=room)
        if key.name not in case.required:
            enough = "" if classes else _enough(bits, case.min_keys - left)
            grammar.add(begin, Rule(skipped.number, "_"), condition=enough)
            grammar.add(going, Rule(after.number, "_"), condition=enough)
        begin, going = skipped, after
    for end, first in ((begin, True), (going, False)):
        grammar.add(end, CLOSE, condition=f"ge({bits},{case.min_keys})")  # the engine wants a parameter to be used
        if classes:
            room = _room(bits, case, 0)
            grammar.add(end, _any_of(emitter, classes, first=first), Rule(going.number, more), condition=room)


def _room(bits: str, case: Case, kept: int) -> str:
    """One more key and `kept` others fit."""
    return "" if case.max_keys is None else f"lt({bits},{case.max_keys - kept})"


def _enough(bits: str, least: int) -> str:
    return f"ge({bits},{least})" if least > 0 else ""


# --- the automaton


class _Automaton:
    def __init__(self, emitter: Emitter, case: Case, named: list[NamedKey], classes: list[KeyClass]) -> None:
        self.emitter = emitter
        self.case = case
        self.named = named
        self.classes = classes
        self.all_witnessed = frozenset(range(len(case.some_keys)))
        self.counting = case.max_keys is not None or case.min_keys > len(case.required)
        self.rules: dict[_State, Rule] = {}
        self.queue: list[_State] = []

    def start(self, presence: Formula) -> Rule | None:
        """None where it would have more than MAX_STATES states."""
        rule = self.rule(_State(0, True, 0, frozenset(), presence))
        while self.queue:
            if len(self.rules) > MAX_STATES:
                return None
            state = self.queue.pop()
            if state.index < len(self.named):
                self.named_key(self.rules[state], state)
            else:
                self.unnamed_keys(self.rules[state], state)
        return rule

    def rule(self, state: _State) -> Rule:
        found = self.rules.get(state)
        if found is None:
            found = self.rules[state] = self.emitter.grammar.new_rule()
            self.queue.append(state)
        return found

    def counted(self, count: int) -> int:
        return min(count, _cap(self.case)) if self.counting else 0

    def is_full(self, count: int) -> bool:
        return self.case.max_keys is not None and count >= self.case.max_keys

    def named_key(self, rule: Rule, state: _State) -> None:
        """Go through the keys from state.index on: required ones in a row, up to the first that may be left out."""
        symbols: list[Symbol] = []
        while state.index < len(self.named):
            key = self.named[state.index]
            there = self.after(state, key.name, present=True)
            gone = None if key.name in self.case.required else self.after(state, key.name, present=False)
            ways = [] if there is None else self.ways(state, key, there)
            if gone is not None:
                for literals, target in ways:
                    self.emitter.grammar.add(rule, *symbols, *self.pair(state, key, literals), self.rule(target))
                self.emitter.grammar.add(rule, *symbols, self.rule(gone))
                return
            if len(ways) != 1:
                for literals, target in ways:
                    self.emitter.grammar.add(rule, *symbols, *self.pair(state, key, literals), self.rule(target))
                return
            symbols += self.pair(state, key, ways[0][0])
            state = ways[0][1]
        self.emitter.grammar.add(rule, *symbols, self.rule(state))

    def pair(self, state: _State, key: NamedKey, literals: Conjunction) -> list[Symbol]:
        return [self.emitter.key(key.name, first=state.first), self.emitter.key_value(key.name, literals)]

    def after(self, state: _State, name: str, *, present: bool) -> _State | None:
        presence = assign(state.presence, name, present)
        if presence is False or (present and self.is_full(state.count)):
            return None
        count = self.counted(state.count + present)
        return _State(state.index + 1, state.first and not present, count, state.witnessed, presence)

    def ways(self, state: _State, key: NamedKey, there: _State) -> list[tuple[Conjunction, _State]]:
        found = [(key.literals, there)]
        for group, literals in key.witness:
            if not group <= state.witnessed:
                witnessed = state.witnessed | group
                found.append((literals, _State(there.index, False, there.count, witnessed, there.presence)))
        return found

    def unnamed_keys(self, rule: Rule, state: _State) -> None:
        add = self.emitter.grammar.add
        if state.witnessed == self.all_witnessed:
            self.finish(rule, state)
            return
        if self.is_full(state.count):
            return
        for kind in self.classes:
            target = _State(state.index, False, self.counted(state.count + 1), state.witnessed | kind.satisfies, True)
            if kind.satisfies <= state.witnessed and kind.satisfies:
                continue
            key = self.emitter.free_key(kind.expression, first=state.first)
            add(rule, key, self.emitter.key_value(None, kind.literals), self.rule(target))

    def finish(self, rule: Rule, state: _State) -> None:
        """Any number of unnamed keys within the limits, and the end."""
        add = self.emitter.grammar.add
        least = max(self.case.min_keys - state.count, 0) if self.counting else 0
        most = None if self.case.max_keys is None else self.case.max_keys - state.count
        plain = [kind for kind in self.classes if not kind.satisfies]
        if least == 0:
            add(rule, CLOSE)
        if not plain or most == 0:
            return
        further = _any_of(self.emitter, plain, first=False)
        if not state.first:
            add(rule, Repeat((further,), max(least, 1), most), CLOSE)
            return
        more = Repeat((further,), max(least - 1, 0), None if most is None else most - 1)
        add(rule, _any_of(self.emitter, plain, first=True), more, CLOSE)
