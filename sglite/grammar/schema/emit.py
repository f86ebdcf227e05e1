"""Conjunctions to grammar rules: one rule per conjunction, one alternative (or rule) per case and type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set
from decimal import Decimal

from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.schema import arrays, objects
from sglite.grammar.schema.cases import (
    ALL_TYPES,
    ARRAY,
    BOOLEAN,
    FRACTION,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    Case,
    Conjunction,
    Gap,
)
from sglite.grammar.schema.distinct import Distinct
from sglite.grammar.schema.emptiness import has_no_match
from sglite.grammar.schema.expand import Expander
from sglite.grammar.schema.grammar import Grammar, Json, Rule, Sequence, Symbol, Terminal
from sglite.grammar.schema.numbers import (
    MAX_DIVISOR,
    ONE_SPELLING,
    common_multiple,
    has_multiple,
    multiple_expression,
    number_expression,
    other_than_multiples,
)
from sglite.grammar.schema.shapes import Conflict, Key, Parts, shapes_of
from sglite.grammar.schema.strings import literal, meet, one_of, quoted, string_parts
from sglite.grammar.schema.values import Json as JsonValue
from sglite.grammar.schema.values import encodable, identity, is_integral, is_number, number_spellings, string_text
from sglite.protocol import Whitespace

EMPTINESS_STEPS = 20  # what asking the engine costs, in steps of the expander
MAX_EXACT_INTEGER = 2**53  # llguidance reads bounds beside multipleOf as doubles


class Emitter:
    """`on_gap` is told of each rule that the grammar leaves out; it may raise to refuse. `not_followed`: pointers of
    uniqueItems that are not to be followed while decoding."""

    def __init__(
        self,
        expander: Expander,
        grammar: Grammar,
        *,
        whitespace: Whitespace,
        on_gap: Callable[[Gap], None],
        not_followed: Set[str] = frozenset(),
    ) -> None:
        self.expander = expander
        self.grammar = grammar
        self.on_gap = on_gap
        self.not_followed = not_followed
        self._start: set[Key] = set()
        self.blank = "" if whitespace == "compact" else " ?"
        self.item_separator = Terminal('","') if whitespace == "compact" else Terminal("/, ?/")
        self._open_keys = False  # some object takes keys that the schema does not name
        self._keys_run_out: dict[str, None] = {}
        self._keys_are_counted = False
        self.distinct = Distinct(self)
        self.parts: dict[Key, Parts] = {}
        self.here = Parts()  # of the conjunction at hand
        self._plain = False  # numbers of the conjunction at hand have one spelling
        self._rules: dict[Key, Rule] = {}
        self._keys: dict[tuple[str, bool], Terminal] = {}
        self._queue: list[tuple[Key, Rule]] = []

    def emit(self, start: Conjunction) -> Rule:
        rule = self._value(start, self._start)
        while self._queue:
            key, target = self._queue.pop()
            literals, self._plain = key
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
        key = (self.expander.canonical(literals), plain or self._plain)
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
            self._numbers(rule, case)
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
        if self._keys_run_out and any(shape.runs_out for shape in shapes):
            unique = (one for part in self.parts.values() for one in part.unique if one.runs_out)
            raise Conflict(next(unique).gap)
        return rules

    def leave_out(self, case: Case, keyword: str, reason: str) -> None:
        """Tell of a rule of `case` that the grammar does not hold: that of the first node with the keyword."""
        for member in sorted(case.done, key=abs):
            node = self.expander.document.node(max(member, ~member))
            if keyword in node.keywords:
                self.on_gap(Gap(ALL_TYPES, node.id, f"{node.pointer}/{keyword}", keyword, reason))
                return
        self.on_gap(Gap(ALL_TYPES, -1, "", keyword, reason))

    def is_empty(self, parts: list[str]) -> bool:
        """Whether the expressions (as strings.string_parts gives them) have no string in common."""
        if len(parts) < 2:
            return False
        self.expander.spend(EMPTINESS_STEPS)
        return has_no_match(meet(parts))

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
            for text in number_spellings(value)[: 1 if self._plain else None]:
                self.grammar.add(rule, Terminal(literal(text)))
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
        text = number_spellings(value)[0] if is_number(value) else None
        return (Terminal(literal(text if text is not None else _scalar_text(value))),)

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

    def _numbers(self, rule: Rule, case: Case) -> None:
        divisor = common_multiple(case.multiples) if case.multiples else None
        types = case.types & NUMBER
        if divisor is not None:
            if not has_multiple(case, divisor):
                return
            types &= INTEGER if is_integral(divisor) else NUMBER
        plain = Case(types=types, low=case.low, high=case.high, not_values=case.not_values)
        expression = number_expression(plain) if types else None
        if expression is None:
            return
        parts = [expression, *self._other_than_multiples(case)]
        if self._plain and types & FRACTION:
            parts.append(ONE_SPELLING)
        own = None if divisor is None else multiple_expression(divisor, integers_only=types == INTEGER)
        if own is not None:
            parts.append(own)
        elif divisor is not None and len(parts) == 1 and self._delegate_multiple(rule, plain, divisor):
            return
        elif divisor is not None:
            self.leave_out(case, "multipleOf", f"multiples of {divisor:f} have no grammar here")
        bounded = case.low is not None and case.high is not None
        if not (bounded and (case.not_multiples or self._plain) and self.is_empty(parts)):
            self.grammar.add(rule, Terminal(meet(parts)))

    def _other_than_multiples(self, case: Case) -> list[str]:
        found = []
        for divisor in case.not_multiples:
            expression = other_than_multiples(divisor)
            if expression is None:
                self.leave_out(case, "multipleOf", f"what is no multiple of {divisor} has no grammar here")
            else:
                found.append(expression)
        return found

    def _delegate_multiple(self, rule: Rule, case: Case, divisor: Decimal) -> bool:
        """Let llguidance count the remainder. False where its double arithmetic would not be exact or takes long."""
        integers = case.types == INTEGER
        bounds = [b.value for b in (case.low, case.high) if b is not None]
        digits = divisor.as_tuple()
        coefficient = int(divisor.scaleb(-int(digits.exponent))) if int(digits.exponent) < 0 else int(divisor)
        if coefficient >= MAX_DIVISOR or case.not_values or any(abs(b) > MAX_EXACT_INTEGER for b in bounds):
            return False
        schema: dict[str, object] = {"type": "integer" if integers else "number"}
        schema["multipleOf"] = divisor.as_integer_ratio()[0] if integers else float(divisor)
        if integers:
            low, high = case.integer_range()
            schema |= {k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}
        elif bounds or case.types & NUMBER != NUMBER:
            return False
        self.grammar.add(rule, Json(json.dumps(schema)))
        return True


def _scalar_text(value: JsonValue) -> str:
    return string_text(value) if isinstance(value, str) else json.dumps(value)
