"""Numbers digit by digit: bounds, divisors and what they must not be multiples of, in one automaton.

No regex of a bearable length says "no multiple of 11", but an automaton does: it remembers the remainder. Its states
become rules of the grammar, one character a terminal. The engine's lexer takes the longest terminal, so where one
number of a schema is written so, all are (`Emitter.by_digits`).

A state is where in the number it is, the remainder of the digits so far by the least common multiple of all divisors
(scaled to whole numbers), and how they compare with each bound.
"""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import cast

import msgspec
import numpy as np

from sglite.grammar.schema.cases import FRACTION, INTEGER, NUMBER, Bound, Case
from sglite.grammar.schema.grammar import Grammar, Rule, Terminal
from sglite.grammar.schema.numbers import common_multiple
from sglite.grammar.schema.values import is_integral, is_number

MAX_STATES = 2_500  # as they are found; 50 microseconds each
MAX_RULES = 1_500  # of those that differ
_DIGITS = "0123456789"

START, SIGN, ZERO, WHOLE, POINT, FRACTIONAL, E, E_SIGN, E_DIGIT, E_LOW, E_HIGH, E_END = range(12)
_MAY_END = frozenset({ZERO, WHOLE, FRACTIONAL, E_DIGIT, E_LOW, E_HIGH, E_END})
_MANTISSA = frozenset({ZERO, WHOLE, FRACTIONAL})


class DigitRule(msgspec.Struct, frozen=True):
    """All that a case says of its numbers. Integers alone are written without a fraction."""

    types: int  # of NUMBER
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Decimal, ...] = ()
    not_multiples: tuple[Decimal, ...] = ()
    not_values: tuple[Decimal, ...] = ()
    one_spelling: bool = False  # no exponent, no zero that could be left out

    @staticmethod
    def of(case: Case, *, one_spelling: bool) -> DigitRule:
        types = case.types & NUMBER
        multiples: tuple[Decimal, ...] = (common_multiple(case.multiples),) if case.multiples else ()
        if multiples and is_integral(multiples[0]):
            types &= INTEGER
        others = [Decimal(value) for value in case.not_multiples]
        if types == INTEGER:
            multiples = tuple(Decimal(m.as_integer_ratio()[0]) for m in multiples)
            others = [Decimal(m.as_integer_ratio()[0]) for m in others]
        elif not types & INTEGER:
            others.append(Decimal(1))
        excluded = {Decimal(value): None for value in case.not_values if is_number(value)}
        return DigitRule(
            types, case.low, case.high, multiples, tuple(dict.fromkeys(others)), tuple(excluded), one_spelling
        )

    @property
    def contradicts_itself(self) -> bool:
        """Every multiple is one that it must not be."""
        return any((Fraction(m) / Fraction(n)).denominator == 1 for m in self.multiples for n in self.not_multiples)

    @property
    def has_exponents(self) -> bool:
        """As in numbers.number_expression: where a sign is all that the bounds ask for."""
        bounds = [bound.value for bound in (self.low, self.high) if bound is not None]
        plain = not (self.multiples or self.not_multiples or self.not_values or self.one_spelling)
        return plain and self.types == NUMBER and len(bounds) < 2 and not any(bounds)


class _Limit(msgspec.Struct, frozen=True):
    """A magnitude, as digits, and how a number's may compare with it (-1, 0, 1)."""

    whole: str
    fraction: str
    allowed: tuple[int, ...]


class _State(msgspec.Struct, frozen=True, cache_hash=True):
    phase: int
    negative: bool = False
    remainder: int = 0  # -1: of a number with more decimals than any multiple has
    decimals: int = 0  # digits of the fraction, up to where they stop to matter
    compared: tuple[tuple[int, int], ...] = ()  # per limit: digits of the whole part so far, and the comparison
    nonzero: bool = False  # the last digit (one spelling: of the fraction), or some digit of it


class Automaton(msgspec.Struct):
    """State 0 is the start; `ends`: those in which a number may end. Every state leads to one of these."""

    moves: list[dict[str, int]] = []  # its own, as the next
    ends: set[int] = set()

    def accepts(self, text: str) -> bool:
        state = 0
        for char in text:
            if not self.moves or char not in self.moves[state]:
                return False
            state = self.moves[state][char]
        return state in self.ends


@lru_cache(maxsize=256)  # a schema is often gone through twice, or in both modes
def automaton(rule: DigitRule) -> Automaton | None:
    """None where it takes too many states; without a state where no number satisfies the rule."""
    machine = _Machine(rule)
    spelled = _spelled_out(machine) if rule.types == INTEGER else None
    if spelled is not None or machine.least_states > MAX_STATES:
        return spelled
    numbers = {(start := _State(START)): 0}
    moves: list[dict[str, int]] = []
    queue = deque([start])
    while queue:
        state = queue.popleft()
        found: dict[str, int] = {}
        for char, target in machine.moves(state):
            number = numbers.get(target)
            if number is None:
                if len(numbers) >= MAX_STATES:
                    return None
                number = numbers[target] = len(numbers)
                queue.append(target)
            found[char] = number
        moves.append(found)
    ends = {number for state, number in numbers.items() if machine.may_end(state)}
    found_all = _smallest(_trimmed(moves, ends))
    return found_all if len(found_all.moves) <= MAX_RULES else None


def _spelled_out(machine: _Machine) -> Automaton | None:
    """Of integers within bounds that are near each other: each by itself."""
    low, high = Case(low=machine.rule.low, high=machine.rule.high).integer_range()
    if low is None or high is None or high - low >= MAX_STATES:
        return None
    excluded = set(machine.rule.not_values)
    step = int(machine.rule.multiples[0]) if machine.rule.multiples else 1
    moves: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for value in range(low + -low % step, high + 1, step):
        if value in excluded or any(value % divisor == 0 for divisor in machine.not_multiples):
            continue
        state = 0
        for char in str(value):
            if char not in moves[state]:
                moves[state][char] = len(moves)
                moves.append({})
            state = moves[state][char]
        ends.add(state)
    found = _smallest(Automaton(moves, ends)) if ends else Automaton()
    return found if len(found.moves) <= MAX_RULES else None


def _trimmed(moves: list[dict[str, int]], ends: set[int]) -> Automaton:
    sources: list[list[int]] = [[] for _ in moves]
    for number, found in enumerate(moves):
        for target in found.values():
            sources[target].append(number)
    alive, stack = set(ends), list(ends)
    while stack:
        for source in sources[stack.pop()]:
            if source not in alive:
                alive.add(source)
                stack.append(source)
    if 0 not in alive:
        return Automaton()
    place = {number: i for i, number in enumerate(sorted(alive))}
    kept = [{char: place[t] for char, t in moves[number].items() if t in alive} for number in place]
    return Automaton(kept, {place[number] for number in ends})


def _smallest(found: Automaton) -> Automaton:
    """The automaton with states that no text tells apart united (Moore's partition refinement)."""
    size = len(found.moves)
    if size < 2:
        return found
    alphabet = sorted(set().union(*found.moves))
    targets = np.full((size, len(alphabet)), size, np.int64)  # `size`: no such move
    columns = {char: column for column, char in enumerate(alphabet)}
    for state, moves in enumerate(found.moves):
        for char, target in moves.items():
            targets[state, columns[char]] = target
    classes = np.zeros(size + 1, np.int64)
    classes[list(found.ends)] = 1
    classes[size] = 2
    count = 0
    while True:
        rows = np.column_stack((classes[:size], classes[targets]))
        data, width = rows.tobytes(), rows.shape[1] * rows.itemsize
        labels: dict[bytes, int] = {}
        found_now = [labels.setdefault(data[at : at + width], len(labels)) for at in range(0, len(data), width)]
        classes = np.array([*found_now, size], np.int64)
        if len(labels) == count:
            break
        count = len(labels)
    place: dict[int, int] = {}
    for state in range(size):
        place.setdefault(int(classes[state]), len(place))
    moved: list[dict[str, int]] = [{} for _ in place]
    for state, moves in enumerate(found.moves):
        moved[place[int(classes[state])]] = {char: place[int(classes[target])] for char, target in moves.items()}
    return Automaton(moved, {place[int(classes[state])] for state in found.ends})


def add_rules(grammar: Grammar, rule: Rule, found: Automaton) -> None:
    """The automaton's texts as texts of `rule`."""
    if not found.moves:
        return
    rules = [grammar.new_rule() for _ in found.moves]
    grammar.add(rule, rules[0])
    for state, moves in enumerate(found.moves):
        targets: dict[int, str] = {}
        for char, target in moves.items():
            targets[target] = targets.get(target, "") + char
        for target, chars in targets.items():
            terminal = characters(chars)
            if target in found.ends:
                grammar.add(rules[state], terminal)
            if found.moves[target]:
                grammar.add(rules[state], terminal, rules[target])


def characters(chars: str) -> Terminal:
    """One of them."""
    if len(chars) == 1:
        return Terminal(f'"{chars}"')
    return Terminal("/[" + "".join("\\" + c if c in "-+." else c for c in chars) + "]/")


class _Machine:
    def __init__(self, rule: DigitRule) -> None:
        self.rule = rule
        self.has_exponents = rule.has_exponents
        self.scale = max((_decimals(m) for m in (*rule.multiples, *rule.not_multiples)), default=0)
        self.multiples = [_scaled(m, self.scale) for m in rule.multiples]
        self.not_multiples = [_scaled(m, self.scale) for m in rule.not_multiples]
        self.modulus = math.lcm(*self.multiples, *self.not_multiples)
        # What a number's digits matter by, so many of its fraction among them.
        self.moduli = [self.modulus // math.gcd(self.modulus, 10**more) for more in range(self.scale, -1, -1)]
        self.limits = (_limits(rule, negative=False), _limits(rule, negative=True))
        self.sides_differ = self.limits[0] != self.limits[1]
        fractions = (len(limit.fraction) for limits in self.limits for limit in limits)
        self.last_decimal = max(self.scale, *fractions, 0) + 1
        # States within a whole part by all but the remainder, then by that: most are come to from many others.
        self._families: dict[tuple[int, bool, tuple[tuple[int, int] | None, ...]], dict[int, _State]] = {}
        self._settled: dict[bool, int] = {}  # see `_fraction_over`

    @property
    def least_states(self) -> int:
        """Roughly: a remainder each, for each length that a bound tells apart."""
        lengths = [len(limit.whole) for limits in self.limits for limit in limits if limit.allowed]
        return self.moduli[0] * max(lengths, default=1)

    def moves(self, state: _State) -> list[tuple[str, _State]]:
        found: list[tuple[str, _State]] = []
        match state.phase:
            case 0 | 1:  # START, SIGN
                if state.phase == START:
                    found.append(("-", _State(SIGN, negative=True)))
                if not (state.negative and (self.rule.types == INTEGER or self.rule.one_spelling)) or self._fractions:
                    found += self._whole(state, "0", ZERO)
                found += self._whole(state, _DIGITS[1:], WHOLE)
            case 3:  # WHOLE
                found += self._whole(state, _DIGITS, WHOLE)
            case 4 | 5:  # POINT, FRACTIONAL
                found += self._fractional(state)
        if state.phase in (ZERO, WHOLE) and self._fractions:
            point = self._point(state)
            found += [] if point is None else [(".", point)]
        if self.has_exponents:
            found += _exponent(state)
        return found

    @property
    def _fractions(self) -> bool:
        return bool(self.rule.types & FRACTION)

    def may_end(self, state: _State) -> bool:
        if state.phase not in _MAY_END:
            return False
        if self.rule.one_spelling and state.phase == FRACTIONAL and not state.nonzero:
            return False
        if self.rule.one_spelling and state.phase == ZERO and state.negative:
            return False
        if self.rule.types == INTEGER and state.phase == ZERO and state.negative:
            return False
        whole = state.phase in (ZERO, WHOLE)
        for limit, (length, sign) in zip(self.limits[state.negative], state.compared, strict=True):
            if whole:
                sign = _resolved(limit, length, sign)
            if sign == 0 and len(limit.fraction) > state.decimals:
                sign = -1
            if sign not in limit.allowed:
                return False
        if state.remainder < 0:
            return not self.multiples
        return self._divides(state.remainder * 10 ** max(self.scale - state.decimals, 0))

    def _divides(self, value: int) -> bool:
        return not any(value % m for m in self.multiples) and all(value % m for m in self.not_multiples)

    def _fraction_over(self, remainder: int) -> int | None:
        """The remainder, one for all that mean the same, after the last decimal that counts; None: no number has it."""
        if remainder < 0:
            return None if self.multiples else remainder
        divides = self._divides(remainder)
        return self._settled.setdefault(divides, remainder) if divides or not self.multiples else None

    def _whole(self, state: _State, digits: str, phase: int) -> list[tuple[str, _State]]:
        limits = self.limits[state.negative]
        before = list(zip(limits, state.compared or ((0, 0),) * len(limits), strict=True))
        turns = _turns(
            [limit.whole[length] for limit, (length, sign) in before if not sign and length < len(limit.whole)]
        )
        negative = state.negative and (self.sides_differ or phase == ZERO)
        shifted, modulus = state.remainder * 10 - ord("0"), self.moduli[0]
        family: dict[int, _State] = {}
        compared: list[tuple[int, int] | None] = []
        found: list[tuple[str, _State]] = []
        for i, digit in enumerate(digits):
            if not i or digit in turns:
                compared = [_one_more(limit, length, sign, digit) for limit, (length, sign) in before]
                family = self._families.setdefault((phase, negative, tuple(compared)), {})
            if None in compared:
                continue
            remainder = (shifted + ord(digit)) % modulus
            target = family.get(remainder)
            if target is None:
                target = family[remainder] = _State(phase, negative, remainder, 0, _all_of(compared))
            found.append((digit, target))
        return found

    def _point(self, state: _State) -> _State | None:
        limits = self.limits[state.negative]
        signs = [_resolved(limit, *compared) for limit, compared in zip(limits, state.compared, strict=True)]
        return self._in_fraction(POINT, state.negative and self.sides_differ, state.remainder, 0, limits, signs)

    def _fractional(self, state: _State) -> list[tuple[str, _State]]:
        at, before = state.decimals, state.remainder
        limits = self.limits[state.negative]
        signs = [sign for _, sign in state.compared]
        others = [limit.fraction[at : at + 1] or "0" for limit in limits]
        turns = _turns([other for sign, other in zip(signs, others, strict=True) if not sign])
        divides = before >= 0 and at < self.scale
        beyond = -1 if self.multiples or self.not_multiples else 0
        found: list[tuple[str, _State]] = []
        target: _State | None = None
        for i, digit in enumerate(_DIGITS):
            if divides or digit in turns or i < 2:  # else it is as the one before
                now = [sign or _order(digit, other) for sign, other in zip(signs, others, strict=True)]
                remainder = (before * 10 + i) % self.moduli[at + 1] if divides else beyond if i else before
                nonzero = i > 0 and self.rule.one_spelling
                target = self._in_fraction(FRACTIONAL, state.negative, remainder, at + 1, limits, now, nonzero=nonzero)
            if target is not None:
                found.append((digit, target))
        return found

    def _in_fraction(
        self,
        phase: int,
        negative: bool,
        remainder: int,
        decimals: int,
        limits: tuple[_Limit, ...],
        signs: list[int],
        *,
        nonzero: bool = False,
    ) -> _State | None:
        """None where no number goes on from there."""
        over = remainder if decimals < self.scale else self._fraction_over(remainder)
        compared = [_settled(limit, sign, decimals) for limit, sign in zip(limits, signs, strict=True)]
        if over is None or None in compared:
            return None
        return _State(phase, negative, over, min(decimals, self.last_decimal), _all_of(compared), nonzero)


def _turns(others: list[str]) -> set[str]:
    """Digits at which the comparison with one of the others changes."""
    return {chr(code) for other in others for code in (ord(other), ord(other) + 1)}


def _exponent(state: _State) -> list[tuple[str, _State]]:
    """Up to 299, as in numbers.EXPONENT; `compared` stays as the mantissa left it."""

    def at(phase: int) -> _State:
        return _State(phase, state.negative, 0, state.decimals, state.compared)

    if state.phase in _MANTISSA:
        found = at(E)
        if state.phase != FRACTIONAL:  # the limits are 0 or none: resolved at once
            compared = tuple((0, sign or int(length > 1)) for length, sign in state.compared)
            found = _State(E, state.negative, 0, 0, compared)
        return [(char, found) for char in "eE"]
    if state.phase in (E, E_SIGN):
        signs = [(char, at(E_SIGN)) for char in "+-"] if state.phase == E else []
        return [*signs, ("0", at(E_LOW)), *((d, at(E_HIGH)) for d in "12"), *((d, at(E_LOW)) for d in _DIGITS[3:])]
    if state.phase == E_HIGH:  # 1 or 2: two more digits
        return [(digit, at(E_DIGIT)) for digit in _DIGITS]
    if state.phase in (E_LOW, E_DIGIT):
        return [(digit, at(E_END)) for digit in _DIGITS]
    return []


def _one_more(limit: _Limit, length: int, sign: int, digit: str) -> tuple[int, int] | None:
    """The comparison after one more digit of the whole part; a number that is longer is greater. One for all that mean
    the same from there on; None where no number keeps the limit."""
    most, allowed = len(limit.whole), limit.allowed
    if length >= most:
        length, sign = most + 1, 1
    else:
        length, sign = length + 1, sign or _order(digit, limit.whole[length])
    if not allowed or (sign > 0 and length >= most and 1 not in allowed):
        return None
    if 1 in allowed:
        if -1 in allowed:
            over = sign != 0
        else:
            over = length >= most and (sign > 0 or (sign == 0 and 0 in allowed and not limit.fraction))
        if over:
            return most + 1, 1
    return length, sign


def _settled(limit: _Limit, sign: int, decimals: int) -> tuple[int, int] | None:
    """As `_one_more`, within the fraction."""
    if sign and sign not in limit.allowed:
        return None
    if 1 in limit.allowed and (sign < 0 or (sign == 0 and 0 in limit.allowed and decimals >= len(limit.fraction))):
        sign = 1
    return 0, sign


def _all_of(compared: list[tuple[int, int] | None]) -> tuple[tuple[int, int], ...]:
    return cast("tuple[tuple[int, int], ...]", tuple(compared))


def _resolved(limit: _Limit, length: int, sign: int) -> int:
    """The comparison once the whole part ended."""
    return -1 if length < len(limit.whole) else 1 if length > len(limit.whole) else sign


def _order(one: str, other: str) -> int:
    return (one > other) - (one < other)


def _limits(rule: DigitRule, *, negative: bool) -> tuple[_Limit, ...]:
    """What the magnitude of a number of one sign must keep."""
    least, most = (rule.high, rule.low) if negative else (rule.low, rule.high)
    found: list[_Limit] = []
    for bound, is_least in ((least, True), (most, False)):
        if bound is None:
            continue
        value = -bound.value if negative else bound.value
        beyond = 1 if is_least else -1
        allowed: tuple[int, ...] = (beyond,) if bound.open else (beyond, 0)
        if value < 0:  # on the other side of zero
            allowed = (-1, 0, 1) if is_least else ()
            value = 0
        if allowed != (-1, 0, 1):
            found.append(_limit(value, allowed))
    for excluded in dict.fromkeys(rule.not_values):
        value = -excluded if negative else excluded
        if value >= 0:
            found.append(_limit(value, (-1, 1)))
    return tuple(found)


def _limit(value: int | Decimal, allowed: tuple[int, ...]) -> _Limit:
    whole, _, fraction = format(Decimal(value), "f").partition(".")
    return _Limit(whole.lstrip("-"), fraction.rstrip("0"), allowed)


def _decimals(value: int | Decimal) -> int:
    return len(format(Decimal(value), "f").partition(".")[2].rstrip("0"))


def _scaled(value: int | Decimal, scale: int) -> int:
    return int(Fraction(value) * 10**scale)
