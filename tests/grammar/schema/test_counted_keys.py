"""Keys that are counted in a parameter of the grammar: as the schema says, and never without a way to the end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.schema import objects
from sglite.grammar.vocab import Vocab
from tests.grammar.helpers import whole

KEYS = "abc"


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


def _subsets(items: str) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


@pytest.mark.parametrize("required", ["", "b", "ac"])
@pytest.mark.parametrize("least", [0, 2, 3])
@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize("rest", [False, True])
def test_all_objects(monkeypatch, compiler, required: str, least: int, most: int | None, rest: bool) -> None:
    monkeypatch.setattr(objects, "MAX_COUNTED", 0)
    if most is not None and most < max(least, len(required)):
        return
    properties = dict.fromkeys(KEYS, {"type": "null"})
    further = {"type": "null"} if rest else False
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": further}
    schema |= {"minProperties": least, "maxProperties": most} if most is not None else {"minProperties": least}
    given = spec.json_schema(schema)
    for names in (*_subsets(KEYS), ("a", "x"), ("a", "b", "c", "x")):
        valid = set(required) <= set(names) and least <= len(names) and (most is None or len(names) <= most)
        valid = valid and (rest or "x" not in names)
        assert whole(compiler, given, json.dumps(dict.fromkeys(names), separators=(",", ":"))) == valid, names


def test_walks_come_to_an_end(compiler) -> None:
    properties = {f"k{i:02}": {"type": "boolean"} for i in range(60)}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = compiler.compile_now(spec.json_schema({**schema, "minProperties": 50, "maxProperties": 51}))
    row = bitmask.empty(compiler.vocab.size)
    for seed in range(3):
        matcher, rng = grammar.matcher(), random.Random(seed)
        while not matcher.finished:
            matcher.fill(row)
            assert matcher.accept([rng.choice(bitmask.ids(row).tolist())]) == 1
