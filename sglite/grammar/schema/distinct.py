"""Whether items can be kept apart while they are written, so that a value can always be completed.

An array never gets stuck if no item does. Items are *open* where every beginning of one goes on in infinitely many
ways, to different values. What is not open *runs out*: then equal items must be equal texts, so that the beginnings
that are left without a new way to go on can be told from the texts that were there (residual/matcher.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglite.grammar.schema.cases import ARRAY, BOOLEAN, FRACTION, NULL, NUMBER, OBJECT, STRING, Case, Conjunction
from sglite.grammar.schema.expand import TooManyCases
from sglite.grammar.schema.keys import all_keys, takes_any_further_key
from sglite.grammar.schema.openness import MANY, string_count, strings_are_open
from sglite.grammar.schema.values import Json, encodable, identity

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

MAX_DISTINCT = 60  # bits of the parameter that remembers which values were there
_MAX_DEPTH = 6


class Distinct:
    """About the values of conjunctions; memoised."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._spelled: dict[Conjunction, bool] = {}

    def is_open(self, literals: Conjunction) -> bool:
        """Proven: every beginning of a value goes on in infinitely many ways."""
        cases = self._cases(literals)
        return bool(cases) and all(
            case.values is None
            and not case.types & (NULL | BOOLEAN | NUMBER)
            and (not case.types & STRING or strings_are_open(case))
            and (not case.types & ARRAY or self._array_is_open(case))
            and (not case.types & OBJECT or takes_any_further_key(self.emitter, case))
            for case in cases
        )

    def can_be_followed(self, literals: Conjunction) -> bool:
        """Proven: of each type, all values are open, or equal ones are equal texts (numbers having one spelling)."""
        cases = self._cases(literals)
        if cases is None:
            return False
        objects = [case for case in cases if case.values is None and case.types & OBJECT]
        arrays = [case for case in cases if case.values is None and case.types & ARRAY]
        return (
            all(self._scalars_have_one_spelling(case) for case in cases)
            and (
                any(map(_is_any_object, objects))  # whatever another case begins goes on as this one
                or all(takes_any_further_key(self.emitter, c) for c in objects)
                or self._objects_have_one_spelling(objects)
            )
            and (
                any(map(_is_any_array, arrays))
                or all(map(self._array_is_open, arrays))
                or all(map(self._array_has_one_spelling, arrays))
            )
        )

    def count(self, literals: Conjunction, depth: int = 0) -> int:
        """At least so many different values, at most MANY."""
        cases = self._cases(literals)
        if cases is None or depth > _MAX_DEPTH:
            return 0
        return max((self._case_count(case, depth) for case in cases), default=0)

    def _array_is_open(self, case: Case) -> bool:
        plain = case.max_items is None and case.unique is None and case.repeated is None and not case.contains
        literals = case.item_literals(prefix_length(case))
        return plain and not (literals and self.emitter.expander.is_hopeless(literals))

    def _has_one_spelling(self, literals: Conjunction) -> bool:
        literals = self.emitter.expander.canonical(literals)
        if literals not in self._spelled:
            self._spelled[literals] = True  # for a value within itself
            cases = self._cases(literals)
            self._spelled[literals] = cases is not None and self._all_have_one_spelling(cases)
        return self._spelled[literals]

    def _all_have_one_spelling(self, cases: list[Case]) -> bool:
        return (
            all(self._scalars_have_one_spelling(case) for case in cases)
            and self._objects_have_one_spelling([c for c in cases if c.values is None and c.types & OBJECT])
            and all(self._array_has_one_spelling(c) for c in cases if c.values is None and c.types & ARRAY)
        )

    def _scalars_have_one_spelling(self, case: Case) -> bool:
        if case.values is not None:
            return not any(isinstance(value, dict | list) for value in case.values)
        return not (case.types & NUMBER and case.multiples)

    def _array_has_one_spelling(self, case: Case) -> bool:
        if (
            case.contains
            or case.repeated is not None
            or (case.unique is not None and not self._is_told_by_the_grammar(case))
        ):
            return False
        length = prefix_length(case)
        last = length if case.max_items is None else min(length, case.max_items - 1)
        return all(self._has_one_spelling(case.item_literals(index)) for index in range(last + 1))

    def _is_told_by_the_grammar(self, case: Case) -> bool:
        """Of an array without items that stand twice: how it can go on is for the grammar alone to say, or it always
        can. The search for beginnings that cannot asks the grammar."""
        literals = case.item_literals(0)
        if prefix_length(case):
            return False
        return bool(finite_values(self.emitter, literals)) or (case.max_items is None and self.is_open(literals))

    def _objects_have_one_spelling(self, cases: list[Case]) -> bool:
        orders: list[list[str]] = []
        for case in cases:
            names = all_keys(self.emitter, case)
            if names is None or not all(self._has_one_spelling(case.key_literals(name)) for name in names):
                return False
            if any([n for n in names if n in other] != [n for n in other if n in names] for other in orders):
                return False
            orders.append(names)
        return True

    def _case_count(self, case: Case, depth: int) -> int:
        if case.values is not None:
            return len(case.values)
        excluded = {identity(value) for value in case.not_values}
        words = {("literal", None): NULL, ("literal", True): BOOLEAN, ("literal", False): BOOLEAN}
        found = max(1, sum(bit & case.types != 0 and word not in excluded for word, bit in words.items()))
        if case.types & NUMBER and not (case.multiples or case.not_multiples or case.not_values):
            low, high = case.integer_range()
            found = MANY if case.types & FRACTION or low is None or high is None else high - low + 1
        if case.types & STRING:
            found = max(found, string_count(case))
        if case.types & ARRAY and self._array_is_open(case):
            found = MANY
        elif case.types & ARRAY and case.min_items < 2 and case.max_items != 0 and not case.contains:
            found = max(found, self.count(case.item_literals(0), depth + 1))
        if case.types & OBJECT:
            if takes_any_further_key(self.emitter, case):
                return MANY
            names = list(case.required)
            if case.presence is True and case.max_keys is None and not case.some_keys:
                names = all_keys(self.emitter, case) or names
            counts = {name: self.count(case.key_literals(name), depth + 1) for name in names}
            found = max([found, *(n + (n > 0 and name not in case.required) for name, n in counts.items())])
        return min(found, MANY)

    def _cases(self, literals: Conjunction) -> list[Case] | None:
        try:
            return self.emitter.cases(literals)
        except TooManyCases:
            return None


def _is_any_object(case: Case) -> bool:
    return case.types & OBJECT != 0 and _only(case, OBJECT) == Case(types=OBJECT)


def _is_any_array(case: Case) -> bool:
    return case.types & ARRAY != 0 and _only(case, ARRAY) == Case(types=ARRAY)


def _only(case: Case, types: int) -> Case:
    """The case without what narrows other types."""
    if types == OBJECT:
        names = ("keys", "some_keys", "key_names", "required", "absent", "presence", "min_keys", "max_keys")
    else:
        names = ("items", "contains", "min_items", "max_items", "unique", "repeated")
    return Case(types=types, values=case.values, **{name: getattr(case, name) for name in names})


def finite_values(emitter: Emitter, literals: Conjunction) -> list[Json] | None:
    """All values of a conjunction, None where they are too many to remember."""
    try:
        cases = emitter.cases(literals)
    except TooManyCases:
        return None
    found: dict[object, Json] = {}
    for case in cases:
        if case.values is None:
            return None
        found.update((identity(value), value) for value in case.values if encodable(value))
    return list(found.values()) if len(found) <= MAX_DISTINCT else None


def prefix_length(case: Case) -> int:
    """From this index on all items have the same rule."""
    return max((len(rule.prefix) for rule in case.items), default=0)
