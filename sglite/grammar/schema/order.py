"""The order of keys that the grammar has, applied to a value.

A value takes the order of the first case that it satisfies: another case may name other keys.
"""

from __future__ import annotations

from sglite.grammar.schema.cases import (
    Case,
    Conjunction,
    Contains,
    Literal,
    SomeKey,
    TextRule,
    type_bit,
)
from sglite.grammar.schema.evaluate import Evaluator, format_holds, is_multiple
from sglite.grammar.schema.expand import Expander, TooManyCases
from sglite.grammar.schema.keys import key_order
from sglite.grammar.schema.pattern_text import found_in
from sglite.grammar.schema.presence import assign, names_in
from sglite.grammar.schema.values import Json, identity, is_number


class KeyOrder:
    def __init__(self, expander: Expander) -> None:
        self.expander = expander

    def reorder(self, value: Json) -> Json:
        return self._reorder(value, (self.expander.document.root,))

    def _reorder(self, value: Json, literals: Conjunction) -> Json:
        if not isinstance(value, dict | list):
            return value
        try:
            cases = self.expander.cases(literals)
        except TooManyCases:
            cases = []
        case = self._fitting(cases, value)
        if isinstance(value, list):
            return [self._reorder(item, self._item_literals(case, i, item)) for i, item in enumerate(value)]
        names = [name for name in key_order(case) if name in value]
        names += [name for name in value if name not in names]
        return {name: self._reorder(value[name], self._key_literals(case, name, value[name])) for name in names}

    def _fitting(self, cases: list[Case], value: Json) -> Case:
        """The first case that holds for the value; a value that is wrong anyway takes any."""
        possible = [case for case in cases if case.types & type_bit(value)]
        if len(possible) > 1:
            holding = (case for case in possible if holds(case, value, self.expander.evaluator))
            return next(holding, possible[0])
        return possible[0] if possible else Case()

    def _item_literals(self, case: Case, index: int, item: Json) -> Conjunction:
        counted = [rule.item for rule in case.contains if satisfies(self.expander.evaluator, rule.item, item)]
        return (*case.item_literals(index), *counted)

    def _key_literals(self, case: Case, name: str, item: Json) -> Conjunction:
        evaluator = self.expander.evaluator
        witness = [r.value for r in case.some_keys if r.value is not None and _is_witness(r, evaluator, name, item)]
        return tuple(dict.fromkeys((*case.key_literals(name), *witness)))


def satisfies(evaluator: Evaluator, literal: Literal, value: Json) -> bool:
    return evaluator.is_valid(max(literal, ~literal), value) == (literal >= 0)


def holds(case: Case, value: Json, evaluator: Evaluator) -> bool:
    """Whether a value satisfies a case, gaps aside."""
    if not type_bit(value) & case.types:
        return False
    if case.values is not None:
        return identity(value) in {identity(option) for option in case.values}
    if identity(value) in {identity(option) for option in case.not_values}:
        return False
    if is_number(value):
        return _number_holds(case, value)
    if isinstance(value, str):
        return _string_holds(case, value)
    if isinstance(value, list):
        return _array_holds(case, value, evaluator)
    return not isinstance(value, dict) or _object_holds(case, value, evaluator)


def _number_holds(case: Case, value: Json) -> bool:
    low, high = case.low, case.high
    if low is not None and (value < low.value or (low.open and value == low.value)):
        return False
    if high is not None and (value > high.value or (high.open and value == high.value)):
        return False
    return all(is_multiple(value, divisor) for divisor in case.multiples) and not any(
        is_multiple(value, divisor) for divisor in case.not_multiples
    )


def _string_holds(case: Case, value: str) -> bool:
    within = case.min_length <= len(value) <= (len(value) if case.max_length is None else case.max_length)
    return within and all(_text_holds(rule, value) != rule.negated for rule in case.texts)


def _text_holds(rule: TextRule, value: str) -> bool:
    return found_in(rule.text, value) if rule.kind == "pattern" else format_holds(rule.text, value)


def _array_holds(case: Case, value: list[Json], evaluator: Evaluator) -> bool:
    if not case.min_items <= len(value) <= (len(value) if case.max_items is None else case.max_items):
        return False
    if case.unique is not None and len({identity(item) for item in value}) < len(value):
        return False
    if case.repeated is not None and len({identity(item) for item in value}) == len(value):
        return False
    items = all(satisfies(evaluator, n, item) for i, item in enumerate(value) for n in case.item_literals(i))
    return items and all(_count_holds(rule, value, evaluator) for rule in case.contains)


def _count_holds(rule: Contains, value: list[Json], evaluator: Evaluator) -> bool:
    count = sum(satisfies(evaluator, rule.item, item) for item in value[rule.start :])
    return rule.least <= count <= (count if rule.most is None else rule.most)


def _object_holds(case: Case, value: dict[str, Json], evaluator: Evaluator) -> bool:
    if not case.min_keys <= len(value) <= (len(value) if case.max_keys is None else case.max_keys):
        return False
    presence = case.presence
    for name in names_in(presence):
        presence = assign(presence, name, name in value)
    if presence is not True or not case.required.keys() <= value.keys() or not case.absent.isdisjoint(value):
        return False
    for name, item in value.items():
        if not all(satisfies(evaluator, literal, name) for literal in case.key_names):
            return False
        if not all(satisfies(evaluator, literal, item) for literal in case.key_literals(name)):
            return False
    return all(any(_is_witness(r, evaluator, name, item) for name, item in value.items()) for r in case.some_keys)


def _is_witness(rule: SomeKey, evaluator: Evaluator, name: str, item: Json) -> bool:
    return (
        name not in rule.named
        and (rule.pattern is None or found_in(rule.pattern, name))
        and not any(found_in(pattern, name) for pattern in rule.not_matching)
        and (rule.name is None or satisfies(evaluator, rule.name, name))
        and (rule.value is None or satisfies(evaluator, rule.value, item))
    )
