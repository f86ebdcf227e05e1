"""Numbers digit by digit: the automaton takes the plain spellings of the numbers of a case and nothing else."""

from __future__ import annotations

import json
import random
from decimal import Decimal

import pytest

from sglite.grammar.schema import prepare
from sglite.grammar.schema.cases import FRACTION, INTEGER, NUMBER, Bound, Case
from sglite.grammar.schema.digits import DigitRule, automaton
from tests.grammar.schema.byte_engine import ByteEngine


def _case(rng: random.Random) -> Case:
    def divisors(most: int) -> tuple[int | Decimal, ...]:
        known = [3, 7, 11, 9, 4, 8, 6, Decimal("2.5"), Decimal("0.3"), Decimal("1.25")]
        return tuple(rng.sample(known, rng.randrange(most)))

    def bound(*values: int | Decimal | None) -> Bound | None:
        value = rng.choice(values)
        return None if value is None else Bound(value, rng.random() < 0.5)

    low, high = bound(None, 0, 5, -7, Decimal("1.5"), -100), bound(None, 50, 6, 100, Decimal("33.3"))
    excluded = tuple(rng.sample([0, 1, 7, Decimal("2.5"), 77, -3], rng.randrange(3)))
    types = rng.choice([INTEGER, NUMBER, FRACTION])
    return Case(types, None, excluded, low, high, multiples=divisors(3), not_multiples=divisors(3))


def _takes(case: Case, rule: DigitRule, text: str) -> bool:
    value = Decimal(text)
    if rule.types == INTEGER and ("." in text or text == "-0"):
        return False
    if not case.types & INTEGER and value == int(value):
        return False
    if rule.one_spelling and (("." in text and text[-1] == "0") or text == "-0"):
        return False
    if case.low is not None and (value, not case.low.open) < (case.low.value, True):
        return False
    if case.high is not None and (value, case.high.open) > (case.high.value, False):
        return False
    wrong = any(value % Decimal(m) for m in case.multiples) or not all(value % Decimal(m) for m in case.not_multiples)
    return not wrong and value not in case.not_values


@pytest.mark.parametrize("seed", range(12))
def test_it_takes_the_numbers_of_the_case_and_nothing_else(seed):
    rng = random.Random(seed)
    case = _case(rng)
    rule = DigitRule.of(case, one_spelling=rng.random() < 0.3)
    found = automaton(rule) if rule.types else None
    if found is None:
        return
    for _ in range(1500):
        text = rng.choice(["", "", "-"]) + str(rng.choice([0, rng.randrange(10), rng.randrange(120)]))
        if rng.random() < 0.5:
            text += "." + "".join(rng.choice("0025713") for _ in range(rng.randrange(1, 4)))
        assert found.accepts(text) == _takes(case, rule, text), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "not": {"multipleOf": 7}}, [1, 8, -13, 10**20], [0, 7, -14, 7 * 10**20]),
        ({"multipleOf": 2.5, "not": {"multipleOf": 4}}, [2.5, 5, -7.5], ["a", 0, 20, 2.4, 40]),
        ({"type": "integer", "multipleOf": 7, "minimum": 2**60}, [7 * (2**60)], [7, 2**60]),
        ({"type": "number", "not": {"multipleOf": 0.7}}, [0.1, 0.71, 7.1, 1], [0, 0.7, 1.4, 7]),
        ({"items": {"anyOf": [{"multipleOf": 11}, {"maximum": -5}]}}, [[11, -7, 22, -5.5]], [[12], [-4]]),
        (
            {"type": "array", "contains": {"type": "integer", "multipleOf": 11, "minimum": 100}, "maxContains": 1},
            [[110], [1, 110, 109, "a", 1.5, 11]],
            [[], [11], [110, 121]],
        ),
        ({"oneOf": [{"multipleOf": 7}, {"multipleOf": 11}], "type": "integer"}, [7, 22], [77, 0, 5]),
        ({"oneOf": [{"multipleOf": 5, "maximum": 80}, {"multipleOf": 10, "maximum": 60}]}, [75, 5, 80], [60, 81, -10]),
        ({"enum": [5, 7, 14, 1.5], "not": {"multipleOf": 7}}, [5, 1.5], [7, 14]),
        ({"anyOf": [{"enum": [70, 105]}, {"type": "integer", "not": {"multipleOf": 7}}]}, [70, 105, 8], [7, 14]),
        ({"type": "integer", "not": {"multipleOf": 999}, "minimum": 900, "maximum": 2000}, [900, 2000], [999, 1998]),
    ],
)
def test_divisors_are_exact(schema, good, bad):
    engine = ByteEngine(prepare(json.dumps(schema)))
    assert [value for value in good if not engine.accepts(_plain(value))] == []
    assert [value for value in bad if engine.accepts(_plain(value))] == []


def _plain(value: object) -> object:
    """A float as the decimal that it is written as."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return Decimal(repr(value)) if isinstance(value, float) else value


def test_numbers_are_written_so_only_where_they_must():
    plain = json.dumps({"type": "integer", "multipleOf": 4})
    assert "/" in prepare(plain).lark
    assert '"-"' in prepare(json.dumps({"type": "integer", "not": {"multipleOf": 7}})).lark


def test_no_digit_of_a_divisor_or_a_value_is_lost():
    divisor = 10**34 + 1
    engine = ByteEngine(prepare(json.dumps({"type": "integer", "multipleOf": divisor, "minimum": 1})))
    assert engine.accepts(divisor * 2)
    assert not engine.accepts(divisor * 2 + 1)
    assert engine.prepared.validate(str(divisor * 2)) is None
    assert engine.prepared.validate(str(divisor * 2 + 1)) is not None
    assert prepare('{"const":1.00000000000000000000000000000000001}').validate("1.0") is not None
