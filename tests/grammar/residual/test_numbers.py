"""Numbers that are checked as they are written: a beginning is alive exactly where some number begins so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from sglite.errors import UnsupportedSchema
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.residual.numbers import NumberRule, Numbers
from sglite.grammar.vocab import Vocab
from tests.grammar.helpers import legal, whole

RULES = [
    NumberRule(fractions=False, multiple=Decimal(97)),
    NumberRule(fractions=False, low=Decimal(5), high=Decimal(300), multiple=Decimal(12), not_multiples=(Decimal(7),)),
    NumberRule(fractions=False, low=Decimal(-150), high=Decimal(-20), not_multiples=(Decimal(2), Decimal(3))),
    NumberRule(fractions=False, low=Decimal("-0.5"), high=Decimal(100), multiple=Decimal(40), not_values=(Decimal(0),)),
    NumberRule(fractions=True, low=Decimal("0.1"), high=Decimal(8), low_open=True, multiple=Decimal("0.7")),
    NumberRule(fractions=True, high=Decimal(3), high_open=True, multiple=Decimal("2.5"), not_multiples=(Decimal(2),)),
    NumberRule(fractions=True, low=Decimal(2), high=Decimal(2), not_multiples=(Decimal(3),)),
]


def _holds(rule: NumberRule, text: str) -> bool:
    value = Fraction(text)
    if not rule.fractions and ("." in text or text == "-0"):
        return False
    if rule.low is not None and (value < rule.low or (rule.low_open and value == rule.low)):
        return False
    if rule.high is not None and (value > rule.high or (rule.high_open and value == rule.high)):
        return False
    divides = [(value / Fraction(divisor)).denominator == 1 for divisor in rule.not_multiples]
    own = rule.multiple is None or (value / Fraction(rule.multiple)).denominator == 1
    return own and not any(divides) and value not in rule.not_values


def _texts() -> Iterator[str]:
    for sign in ("", "-"):
        for number in range(400):
            yield f"{sign}{number}"
        for number in range(90):
            yield from (f"{sign}{number // 10}.{number % 10}{more}" for more in ("", "0", "5"))


@pytest.mark.parametrize("rule", RULES)
def test_a_beginning_is_alive_exactly_where_a_number_begins_so(rule):
    numbers = Numbers((rule,))
    good = [text for text in _texts() if _holds(rule, text)]
    assert good
    for text in _texts():
        assert numbers.holds(text.encode()) == _holds(rule, text), text
    for text in good:
        assert all(numbers.is_alive(text[:end].encode()) for end in range(len(text) + 1)), text
    for text in list(_texts())[::13]:
        if numbers.is_alive(text.encode()):
            _complete(numbers, text)


def _complete(numbers: Numbers, text: str) -> None:
    for _ in range(80):
        if numbers.holds(text.encode()):
            return
        digits = "0123456789" if text not in ("0", "-0") else ""
        more = [char for char in digits + ("" if "." in text else ".") if numbers.is_alive((text + char).encode())]
        assert more, text
        text += more[0]
    raise AssertionError(text)


def test_a_number_satisfies_one_of_several_rules():
    numbers = Numbers(
        (NumberRule(fractions=False, multiple=Decimal(97)), NumberRule(fractions=False, low=Decimal(900)))
    )
    assert numbers.holds(b"97") and numbers.holds(b"901") and not numbers.holds(b"98")


def test_nothing_is_rounded():
    divisor = 10**40 + 1
    numbers = Numbers((NumberRule(fractions=False, multiple=Decimal(divisor)),))
    assert numbers.holds(str(divisor * 3).encode())
    assert not numbers.holds(str(divisor * 3 + 1).encode())


# --- within a schema

LARGE = {"type": "integer", "multipleOf": 999_983, "minimum": 1}
_SPANNING = ["99", "999", "983", "83}", "83]", "83,", "3]}", '":9', "83,99", "0]", "1]}", '"b":', "},", '{"a":9']


def _vocab() -> Vocab:
    texts = [*(bytes([i]) for i in range(256)), *(text.encode() for text in _SPANNING)]
    return Vocab(
        tokens=(*texts, b""),
        names=(*([b""] * len(texts)), b"<|end|>"),
        stop_ids=(len(texts),),
        encode=lambda text: list(text.encode()),
    )


@pytest.fixture(scope="module")
def spanning() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(_vocab(), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


SCHEMAS: dict[str, Any] = {
    "alone": LARGE,
    "items": {"type": "array", "items": LARGE, "minItems": 1, "maxItems": 3},
    "keys": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": LARGE}, "b": {"type": "number", "multipleOf": 0.70001}},
        "required": ["a"],
    },
    "bounded": {"type": "array", "items": {**LARGE, "maximum": 40_000_000}, "minItems": 1},
    "or others": {"anyOf": [LARGE, {"enum": [5, "a"]}, {"type": "number", "exclusiveMaximum": -1000}]},
    "neither": {"type": "integer", "not": {"anyOf": [{"multipleOf": 10_007}, {"multipleOf": 7}]}, "minimum": 10},
}


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("alone", "999983", True),
        ("alone", "1999966", True),
        ("alone", "999982", False),
        ("alone", "0", False),
        ("items", "[999983,1999966]", True),
        ("items", "[999983,1999967]", False),
        ("keys", '{"a":[999983],"b":1.40002}', True),
        ("keys", '{"a":[999983],"b":1.400020}', True),
        ("keys", '{"a":[],"b":1.4}', False),
        ("keys", '{"a":[],"c":[5,true,-1e9]}', True),
        ("bounded", "[39999320]", True),
        ("bounded", "[40999303]", False),
        ("or others", "5", True),
        ("or others", "6", False),
        ("or others", '"a"', True),
        ("or others", "-1000.5", True),
        ("neither", "10007", False),
        ("neither", "10006", True),
        ("neither", "14", False),
    ],
)
def test_numbers_with_large_divisors_are_exact(spanning, name, text, accepted):
    assert whole(spanning, spec.json_schema(SCHEMAS[name]), text) == accepted


def _walks(compiler: GrammarCompiler, name: str, seed: int, steps: int) -> Iterator[tuple[Any, list[int]]]:
    rng = random.Random(seed)
    matcher = compiler.compile_now(spec.json_schema(SCHEMAS[name])).matcher()
    for _ in range(steps):
        if matcher.finished:
            return
        allowed = legal(matcher, compiler.vocab.size)
        yield matcher, allowed
        fond = [i for i in allowed if i in compiler.vocab.stop_ids or set(compiler.vocab.tokens[i]) <= set(b']},3"')]
        assert matcher.accept([rng.choice(fond if fond and rng.random() < 0.7 else allowed)]) == 1


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("seed", range(3))
def test_the_mask_says_what_accept_says_also_of_tokens_over_several_values(spanning, name, seed):
    vocab = spanning.vocab
    for matcher, allowed in _walks(spanning, name, seed, 30):
        forced = matcher.forced()
        for token_id in range(vocab.size):
            taken = matcher.accept([token_id])
            matcher.rollback(taken)
            assert forced or (taken == 1) == (token_id in allowed), vocab.tokens[token_id]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_that_ends_ends_with_a_valid_value(spanning, name, seed):
    grammar = spanning.compile_now(spec.json_schema(SCHEMAS[name]))
    text = b""
    for matcher, _ in _walks(spanning, name, seed, 200):
        text = bytes(getattr(matcher, "_text", b""))
        if matcher.can_stop:
            assert grammar.validate(text.decode()) is None, text


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("extra", [0, 40])
def test_a_number_ends_within_the_budget(spanning, name, extra):
    compiled, vocab, rng = spanning.compile_now(spec.json_schema(SCHEMAS[name])), spanning.vocab, random.Random(extra)
    budget = 40 + extra
    matcher = compiled.matcher(budget=budget)
    row, text = bitmask.empty(vocab.size), b""
    for _ in range(budget):
        if matcher.finished:
            break
        matcher.fill(row)
        allowed = [i for i in bitmask.ids(row).tolist() if i not in vocab.stop_ids]
        if not allowed:
            break
        token_id = rng.choice(allowed)
        assert matcher.accept([token_id]) == 1
        text += vocab.tokens[token_id]
    assert matcher.can_stop
    assert compiled.validate(text.decode()) is None
    json.loads(text)


def test_a_number_beside_texts_at_its_place_is_followed(spanning):
    schema = {
        "anyOf": [
            {"properties": {"a": LARGE, "b": {"const": 1}}, "required": ["a", "b"], "type": "object"},
            {"properties": {"a": {"type": "string"}, "b": {"const": 2}}, "required": ["a", "b"], "type": "object"},
        ]
    }
    assert whole(spanning, spec.json_schema(schema), '{"a":999983,"b":1}')
    assert whole(spanning, spec.json_schema(schema), '{"a":"999982","b":2}')
    assert not whole(spanning, spec.json_schema(schema), '{"a":999982,"b":1}')


def test_a_number_that_may_be_one_of_two_things_is_refused_or_validated(spanning):
    other = {"type": "integer", "multipleOf": 999_979}
    schema = {
        "anyOf": [
            {"properties": {"a": LARGE, "b": {"const": 1}}, "required": ["a", "b"], "type": "object"},
            {"properties": {"a": other, "b": {"const": 2}}, "required": ["a", "b"], "type": "object"},
        ]
    }
    with pytest.raises(UnsupportedSchema) as caught:
        spanning.compile_now(spec.json_schema(schema))
    assert caught.value.keyword == "multipleOf"
    coverage = spanning.compile_now(spec.json_schema(schema, on_unsupported="validate")).coverage
    assert {item.keyword for item in coverage.items if item.status == "validated"} == {"multipleOf"}
