"""Numbers of a case: a regex where one of bearable length says it all, digit by digit otherwise (digits.py), and where
that takes too many states, any number within the bounds, checked while it is written (residual/numbers.py).
"""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglite.grammar.residual.numbers import NumberRule, Numbers
from sglite.grammar.schema.cases import FRACTION, INTEGER, NUMBER, Case
from sglite.grammar.schema.digits import DigitRule, add_rules, automaton
from sglite.grammar.schema.grammar import Json, Rule, Terminal
from sglite.grammar.schema.numbers import (
    MAX_DIVISOR,
    ONE_SPELLING,
    common_multiple,
    has_multiple,
    multiple_expression,
    number_expression,
    other_than_multiples,
)
from sglite.grammar.schema.strings import meet
from sglite.grammar.schema.values import is_number

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

MAX_EXACT_INTEGER = 2**53  # llguidance reads bounds beside multipleOf as doubles
MAX_FOLLOWED_VALUES = 64  # constants beside numbers that are checked as they are written


class NeedsDigits(Exception):
    """Some number of the schema has to be written digit by digit."""


def emit_number(emitter: Emitter, rule: Rule, case: Case) -> None:
    """Raises NeedsDigits."""
    emitter.here.number_cases.append(case)
    if case.multiples or case.not_multiples or emitter.by_digits:
        _divided(emitter, rule, case)
        return
    expression = _expression(emitter, case)
    if expression is not None:
        bounded = case.low is not None and case.high is not None
        if not (bounded and emitter.plain and emitter.is_empty(expression)):
            emitter.grammar.add(rule, Terminal(meet(expression)))


def _expression(emitter: Emitter, case: Case) -> list[str] | None:
    """Of a case without multipleOf, as an intersection; None where there are no numbers."""
    found = number_expression(case)
    if found is None:
        return None
    return [found, ONE_SPELLING] if emitter.plain and case.types & FRACTION else [found]


def _divided(emitter: Emitter, rule: Rule, case: Case) -> None:
    wanted = DigitRule.of(case, one_spelling=emitter.plain)
    if not wanted.types or wanted.contradicts_itself:
        return
    if wanted.multiples and not has_multiple(case, wanted.multiples[0]):
        return
    if not emitter.by_digits and _as_terminal(emitter, rule, case, wanted.types):
        return
    found = _by_digits(emitter, wanted)
    if found is not None and not emitter.by_digits:
        raise NeedsDigits
    if found is None:
        wanted = _without_divisors(emitter, case, wanted)
        found = _by_digits(emitter, wanted) if emitter.by_digits and wanted is not None else None
    if wanted is None:
        return
    if emitter.by_digits:
        if found is None:
            emitter.leave_out(case, "not", "it excludes too many numbers")
            found = _by_digits(emitter, replace(wanted, not_values=()))
        assert found is not None
        emitter.grammar.add(rule, found)
        return
    plain = Case(types=wanted.types, low=case.low, high=case.high, not_values=case.not_values)
    expression = _expression(emitter, plain)
    if expression is not None:
        emitter.grammar.add(rule, Terminal(meet([*expression, "/[^eE]*/"])))


def _as_terminal(emitter: Emitter, rule: Rule, case: Case, types: int) -> bool:
    """The numbers as one terminal; False where no regex says what they must (not) be multiples of."""
    divisor = common_multiple(case.multiples) if case.multiples else None
    plain = Case(types=types, low=case.low, high=case.high, not_values=case.not_values)
    parts = _expression(emitter, plain)
    if parts is None:
        return True
    others = [other_than_multiples(each) for each in case.not_multiples]
    own = None if divisor is None else multiple_expression(divisor, integers_only=types == INTEGER)
    if divisor is not None and own is None:
        return not others and len(parts) == 1 and _delegated(emitter, rule, plain, divisor)
    if None in others:
        return False
    parts += [each for each in (*others, own) if each is not None]
    bounded = case.low is not None and case.high is not None
    if not (bounded and (others or emitter.plain) and emitter.is_empty(parts)):
        emitter.grammar.add(rule, Terminal(meet(parts)))
    return True


def _delegated(emitter: Emitter, rule: Rule, case: Case, divisor: Decimal) -> bool:
    """Let llguidance count the remainder. False where its double arithmetic would not be exact or takes long."""
    integers = case.types == INTEGER
    bounds = [b.value for b in (case.low, case.high) if b is not None]
    coefficient = int(Fraction(divisor) * 10 ** max(0, -int(divisor.as_tuple().exponent)))
    if coefficient >= MAX_DIVISOR or case.not_values or any(abs(b) > MAX_EXACT_INTEGER for b in bounds):
        return False
    schema: dict[str, object] = {"type": "integer" if integers else "number"}
    schema["multipleOf"] = divisor.as_integer_ratio()[0] if integers else float(divisor)
    if integers:
        low, high = case.integer_range()
        schema |= {k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}
    elif bounds or case.types & NUMBER != NUMBER:
        return False
    emitter.grammar.add(rule, Json(json.dumps(schema)))
    return True


# --- digit by digit


def _by_digits(emitter: Emitter, wanted: DigitRule) -> Rule | None:
    """None where it takes too many states."""
    if wanted not in emitter.automata:
        found = automaton(wanted)
        own = emitter.automata[wanted] = None if found is None else emitter.grammar.new_rule()
        if found is not None and own is not None:
            add_rules(emitter.grammar, own, found)
    return emitter.automata[wanted]


# --- while it is written


def _without_divisors(emitter: Emitter, case: Case, wanted: DigitRule) -> DigitRule | None:
    """What is left for the grammar once the divisors are checked while decoding, or not at all; None: no numbers."""
    gap = emitter.gap(case, "multipleOf", "counting its remainders takes too many states")
    followed = followed_numbers([case])
    if gap.pointer in emitter.not_followed or followed is None or emitter.plain:
        emitter.on_gap(gap)
    elif not Numbers(followed).is_alive(b""):
        return None
    else:
        emitter.here.followed_numbers = emitter.here.followed_numbers or gap
    return replace(wanted, multiples=(), not_multiples=())


def followed_numbers(cases: list[Case]) -> tuple[NumberRule, ...] | None:
    """What the numbers of some of the cases satisfy; None where there is too much to it."""
    found: dict[NumberRule, None] = {}
    for case in cases:
        if case.values is not None:
            numbers = [Decimal(value) for value in case.values if is_number(value)]
            if len(numbers) > MAX_FOLLOWED_VALUES:
                return None
            found.update({NumberRule(fractions=True, low=each, high=each): None for each in numbers})
        elif (rule := _followed(case)) is not None:
            if not rule.can_be_followed:
                return None
            found[rule] = None
    return tuple(found)


def _followed(case: Case) -> NumberRule | None:
    wanted = DigitRule.of(case, one_spelling=False)
    if not wanted.types:
        return None
    return NumberRule(
        fractions=bool(wanted.types & FRACTION),
        low=None if case.low is None else Decimal(case.low.value),
        high=None if case.high is None else Decimal(case.high.value),
        low_open=case.low is not None and case.low.open,
        high_open=case.high is not None and case.high.open,
        multiple=wanted.multiples[0] if wanted.multiples else None,
        not_multiples=wanted.not_multiples,
        not_values=wanted.not_values,
        exponents=wanted.has_exponents,
    )
