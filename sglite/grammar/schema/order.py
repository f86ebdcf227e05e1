"""The order of keys that the grammar has, applied to a value."""

from __future__ import annotations

from sglite.grammar.schema.cases import OBJECT, Case, Conjunction
from sglite.grammar.schema.expand import Expander, TooManyCases
from sglite.grammar.schema.objects import key_order
from sglite.grammar.schema.values import Json


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
            cases = [Case()]
        if isinstance(value, list):
            case = self._fitting(cases, value)
            return [self._reorder(item, case.item_literals(i)) for i, item in enumerate(value)]
        case = self._fitting([c for c in cases if c.types & OBJECT], value)
        names = [name for name in key_order(case) if name in value]
        names += [name for name in value if name not in names]
        return {name: self._reorder(value[name], case.key_literals(name)) for name in names}

    def _fitting(self, cases: list[Case], value: Json) -> Case:
        """The first case all of whose literals the value satisfies; a value that is wrong anyway takes any."""
        evaluator = self.expander.evaluator
        for case in cases[:-1]:
            if _keys_fit(case, value) and all(evaluator.is_valid(max(n, ~n), value) == (n >= 0) for n in case.done):
                return case
        return cases[-1] if cases else Case()


def _keys_fit(case: Case, value: Json) -> bool:
    return not isinstance(value, dict) or (case.required.keys() <= value.keys() and case.absent.isdisjoint(value))
