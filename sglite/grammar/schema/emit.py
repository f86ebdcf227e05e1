"""Conjunctions to grammar rules: one rule per conjunction, one alternative (or rule) per case and type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set

from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.schema import arrays, numerals, objects
from sglite.grammar.schema.cases import (
    ALL_TYPES,
    ARRAY,
    BOOLEAN,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    Case,
    Conjunction,
    Gap,
)
from sglite.grammar.schema.digits import DigitRule, characters
from sglite.grammar.schema.distinct import Distinct
from sglite.grammar.schema.emptiness import has_no_match
from sglite.grammar.schema.expand import Expander
from sglite.grammar.schema.grammar import Grammar, Rule, Sequence, Symbol, Terminal
from sglite.grammar.schema.languages import Languages
from sglite.grammar.schema.shapes import Conflict, Key, Parts, shapes_of
from sglite.grammar.schema.strings import literal, meet, one_of, quoted, string_parts
from sglite.grammar.schema.values import Json as JsonValue
from sglite.grammar.schema.values import encodable, identity, is_number, number_spellings, string_text
from sglite.protocol import Whitespace

EMPTINESS_STEPS = 20  # what asking the engine costs, in steps of the expander


class Emitter:
    """`on_gap` is told of each rule that the grammar leaves out; it may raise to refuse. `not_followed`: pointers of
    keywords that are not to be followed while decoding. Raises NeedsDigits where only `by_digits` will do."""

    def __init__(
        self,
        expander: Expander,
        grammar: Grammar,
        *,
        whitespace: Whitespace,
        on_gap: Callable[[Gap], None],
        not_followed: Set[str] = frozenset(),
        by_digits: bool = False,
    ) -> None:
        self.expander = expander
        self.grammar = grammar
        self.on_gap = on_gap
        self.not_followed = not_followed
        self.by_digits = by_digits  # numbers are written as in digits.py
        self.automata: dict[DigitRule, Rule | None] = {}
        self._start: set[Key] = set()
        self.blank = "" if whitespace == "compact" else " ?"
        self.item_separator = Terminal('","') if whitespace == "compact" else Terminal("/, ?/")
        self._open_keys = False  # some object takes keys that the schema does not name
        self._keys_run_out: dict[str, None] = {}
        self._keys_are_counted = False
        self.distinct = Distinct(self)
        self.languages = Languages()
        self.parts: dict[Key, Parts] = {}
        self.here = Parts()  # of the conjunction at hand
        self.plain = False  # numbers of the conjunction at hand have one spelling
        self._rules: dict[Key, Rule] = {}
        self._keys: dict[tuple[str, bool], Terminal] = {}
        self._queue: list[tuple[Key, Rule]] = []
        self.begun: dict[tuple[int, str, int], Rule] = {}  # by rule before, key and value: lists of optional keys

    def emit(self, start: Conjunction) -> Rule:
        rule = self._value(start, self._start)
        while self._queue:
            key, target = self._queue.pop()
            literals, self.plain = key
            self.here = self.parts[key] = Parts()
            branches = self.expander.terms.plain_union(literals)
            if branches is not None:
                for branch in branches:
                    self.grammar.add(target, self._value((branch,), self.here.same))
                continue
            for case in self.expander.cases(literals):
                self._case(target, case)
        return rule

    def item(self, index: int | None, literals: Conjunction) -> Rule:
        """The rule of an item of the array at hand; None: of all that are not named by index."""
        place = self.here.rest if index is None else self.here.items.setdefault(index, set())
        return self._value(literals, place, plain=self.here.plain_items)

    def key_value(self, name: str | None, literals: Conjunction) -> Rule:
        """The rule of the value of a key of the object at hand; None: of all that are not named."""
        return self._value(literals, self.here.other if name is None else self.here.named.setdefault(name, set()))

    def _value(self, literals: Conjunction, place: set[Key], *, plain: bool = False) -> Rule:
        """The rule of the values that satisfy all of `literals`."""
        key = (self.expander.canonical(literals), plain or self.plain)
        place.add(key)
        found = self._rules.get(key)
        if found is None:
            found = self._rules[key] = self.grammar.new_rule()
            self._queue.append((key, found))
        return found

    def cases(self, literals: Conjunction) -> list[Case]:
        return self.expander.cases(literals)

    def _case(self, rule: Rule, case: Case) -> None:
        for gap in case.gaps:
            if gap.mask & case.types:
                self.on_gap(gap)
        if case.values is not None:
            self.here.number_cases += [case] if case.types & NUMBER else []
            self.here.other_arrays |= case.types & ARRAY != 0
            self._finite(rule, case.values)
            return
        if case.types & NULL:
            self.grammar.add(rule, Terminal('"null"'))
        if case.types & BOOLEAN:
            excluded = {identity(value) for value in case.not_values}
            for value in (True, False):
                if ("literal", value) not in excluded:
                    self.grammar.add(rule, Terminal(f'"{json.dumps(value)}"'))
        if case.types & NUMBER:
            numerals.emit_number(self, rule, case)
        if case.types & STRING:
            parts = string_parts(case)
            if parts is not None and not self.is_empty(parts):
                self.grammar.add(rule, Terminal(quoted(meet(parts))))
        if case.types & ARRAY:
            arrays.emit_array(self, rule, case)
        if case.types & OBJECT:
            objects.emit_object(self, rule, case)

    def take_free_keys(self, *, run_out: Iterable[str], counted: bool) -> None:
        """Some object takes keys that the schema does not name (see ResidualRules)."""
        self._open_keys = True
        self._keys_run_out.update(dict.fromkeys(run_out))
        self._keys_are_counted |= counted

    @property
    def residual(self) -> ResidualRules | None:
        """Once all is emitted. Raises Conflict."""
        shapes = shapes_of(self.parts, next(iter(self._start)))
        if not self._open_keys and not shapes:
            return None
        rules = ResidualRules(
            keys_run_out=tuple(self._keys_run_out), keys_are_counted=self._keys_are_counted, shapes=shapes
        )
        parts = self.parts.values()
        if self._keys_run_out and any(shape.runs_out for shape in shapes):
            raise Conflict(next(one.gap for part in parts for one in part.unique if one.runs_out))
        return rules

    def leave_out(self, case: Case, keyword: str, reason: str) -> None:
        """Tell of a rule of `case` that the grammar does not hold."""
        self.on_gap(self.gap(case, keyword, reason))

    def gap(self, case: Case, keyword: str, reason: str) -> Gap:
        """About the first node of the case with the keyword."""
        for member in sorted(case.done, key=abs):
            node = self.expander.document.node(max(member, ~member))
            if keyword in node.keywords:
                return Gap(ALL_TYPES, node.id, f"{node.pointer}/{keyword}", keyword, reason)
        return Gap(ALL_TYPES, -1, "", keyword, reason)

    def is_empty(self, parts: list[str]) -> bool:
        """Whether the expressions (as strings.string_parts gives them) have no string in common."""
        if len(parts) < 2:
            return False
        self.expander.spend(EMPTINESS_STEPS)
        told = self.languages.is_empty(parts)
        return has_no_match(meet(parts)) if told is None else told

    def _finite(self, rule: Rule, values: tuple[JsonValue, ...]) -> None:
        usable = [value for value in values if encodable(value)]
        texts = [value for value in usable if isinstance(value, str)]
        if len(texts) > 1:
            self.grammar.add(rule, Terminal(quoted(one_of(texts))))
        for value in usable:
            if not isinstance(value, str) or len(texts) == 1:
                self.constant(rule, value)

    def constant(self, rule: Rule, value: JsonValue) -> None:
        """Add the spellings of one value to `rule`."""
        if is_number(value):
            for text in number_spellings(value)[: 1 if self.plain else None]:
                self.grammar.add(rule, *self._number_text(text))
        else:
            self.grammar.add(rule, *self._spelling(value))

    def _spelling(self, value: JsonValue) -> Sequence:
        if isinstance(value, list):
            inner: list[Symbol] = []
            for i, item in enumerate(value):
                inner.extend([self.item_separator] * (i > 0))
                inner.extend(self._spelling(item))
            return (Terminal('"["'), *inner, Terminal('"]"'))
        if isinstance(value, dict):
            inner = []
            for i, (name, item) in enumerate(value.items()):
                inner.append(self.key(name, first=i == 0))
                inner.extend(self._spelling(item))
            return (Terminal('"{"'), *inner, Terminal('"}"'))
        if is_number(value) and len(number_spellings(value)) > 1:
            rule = self.grammar.new_rule()
            self.constant(rule, value)
            return (rule,)
        if is_number(value):
            return self._number_text(number_spellings(value)[0])
        return (Terminal(literal(_scalar_text(value))),)

    def _number_text(self, text: str) -> Sequence:
        return tuple(map(characters, text)) if self.by_digits else (Terminal(literal(text)),)

    def key(self, name: str, *, first: bool) -> Terminal:
        """A key with its colon and, unless it is the first, the comma before it."""
        found = self._keys.get((name, first))
        if found is None:
            if self.blank:
                found = Terminal(quoted(one_of([name]), before="" if first else ", ?", after=": ?"))
            else:
                found = Terminal(literal(("" if first else ",") + string_text(name) + ":"))
            self._keys[name, first] = found
        return found

    def free_key(self, expression: str, *, first: bool) -> Terminal:
        """The same for any key that `expression` (between the quotes) takes."""
        return Terminal(quoted(expression, before="" if first else f",{self.blank}", after=f":{self.blank}"))


def _scalar_text(value: JsonValue) -> str:
    return string_text(value) if isinstance(value, str) else json.dumps(value)
