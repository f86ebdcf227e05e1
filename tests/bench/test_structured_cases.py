from __future__ import annotations

import json

import pytest

from sglite.bench.structured.cases import SCHEMAS, case
from sglite.bench.structured.real import RECORDS
from sglite.errors import InvalidRequest
from sglite.grammar.schema import prepare


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_and_its_item_are_enforced_exactly(name: str) -> None:
    for schema in (SCHEMAS[name], SCHEMAS[name]["items"]):
        assert not any(item.status == "validated" for item in prepare(json.dumps(schema)).coverage.items)


def test_the_records_of_the_lookup_test_are_a_schema() -> None:
    assert prepare(json.dumps(RECORDS)).lark


def test_a_name_tells_rows_and_the_share_that_is_constrained() -> None:
    mix, calls = case("mix20_32"), case("calls_4")
    assert (mix.rows, mix.bound, calls.rows, calls.bound) == (32, 6, 4, 4)
    assert mix.prompts(100, seed="1") != mix.prompts(100, seed="2")
    more = case("keys_4x3")
    assert (more.rows, more.bound, len(more.prompts(100, seed="1"))) == (4, 4, 12)


@pytest.mark.parametrize("name", ["mix_32", "extract", "free_1", "deep_x"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        case(name)
