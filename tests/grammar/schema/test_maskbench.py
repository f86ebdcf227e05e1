"""Real schemas with valid and invalid instances (MaskBench): every second one, so that it stays fast."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sglite.errors import GrammarError
from sglite.grammar.schema import prepare
from tests.grammar.schema.byte_engine import ByteEngine, compact

DATA = Path(__file__).parents[4] / "shared" / "maskbench" / "dev.jsonl.xz"
EVERY = 2

pytestmark = [pytest.mark.skipif(not DATA.exists(), reason="the data set is not there"), pytest.mark.timeout(280)]


def _cases() -> list[dict[str, Any]]:
    with lzma.open(DATA, "rt") as lines:
        return [json.loads(line, parse_float=Decimal) for i, line in enumerate(lines) if i % EVERY == 0]


def test_no_invalid_instance_is_accepted_and_few_schemas_are_refused():
    cases = _cases()
    counts: Counter[str] = Counter()
    accepted_invalid, refused_valid = [], []
    for case in cases:
        try:
            prepared = prepare(compact(case["schema"]))
            engine = ByteEngine(prepared)
        except GrammarError:
            counts["refused"] += 1
            continue
        except ValueError:
            counts["over the engine's limits"] += 1
            continue
        assert prepared.coverage.exact
        for test in case["tests"]:
            accepted = engine.accepts(test["data"])
            counts["valid" if test["valid"] else "invalid"] += 1
            if accepted and not test["valid"]:
                accepted_invalid.append(case["name"])
            if test["valid"] and not accepted:
                refused_valid.append(case["name"])
    assert accepted_invalid == []
    assert len(refused_valid) <= 0.003 * counts["valid"] + 1, refused_valid
    assert counts["refused"] + counts["over the engine's limits"] < 0.05 * len(cases), counts
