"""Objects of a case: the named keys in schema order, each at most once, then all others.

The rules form an automaton over the named keys. Its state is the next key, whether a comma is due, how many
keys there are (where min/maxProperties ask), which "at least one key such that" are satisfied, and what is
left of the presence formula. Behind the last named key come keys that the schema does not name: they fall
into classes by the patterns that they match (keys.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglite.grammar.schema.cases import Case, Conjunction
from sglite.grammar.schema.emptiness import some_texts
from sglite.grammar.schema.grammar import Repeat, Rule, Symbol, Terminal
from sglite.grammar.schema.keys import Classes, KeyClass, NamedKey, classes_of, key_order, list_names, named_key
from sglite.grammar.schema.presence import Formula, assign, names_in

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

OPEN, CLOSE = Terminal('"{"'), Terminal('"}"')
MAX_SOME_KEYS = 4
MAX_STATES = 4000
MAX_SOUGHT = 64  # names that are looked for, to see that there are as many
MAX_COUNTED = 1000  # states with a count each; beyond, the count is a parameter


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
    found = classes_of(emitter, case, names)
    if case.listed is None and (found.witnesses_run_out or _may_lack_keys(case, found)):
        list_names(case, found)
        names = key_order(case)
        found = classes_of(emitter, case, names)
    named = [key for name in names if name not in case.absent and (key := named_key(emitter, case, name)) is not None]
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
