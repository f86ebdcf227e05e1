"""Output under a schema obeys it, at temperature 1, on a model too small to want to."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

import sglite as sgl
from sglite.protocol import FinishReason

pytestmark = pytest.mark.model

_OK = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
_TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["person", "animal", "thing"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
    {
        "anyOf": [
            _OK,
            {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 2, "maxItems": 4},
            {"type": "string", "pattern": "^[a-z]{2,8}$"},
        ]
    },
    {"$defs": {"tree": _TREE}, "$ref": "#/$defs/tree"},
    {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "any_of", "recursive", "unique"])
def test_a_hundred_answers_validate_or_ran_out_of_tokens(engine: sgl.Engine, schema: dict) -> None:
    prompts = [f"Example {i} as JSON: " for i in range(100 // len(SCHEMAS))]
    sampling = [{"temperature": 1.0, "seed": i, "max_tokens": 64} for i in range(len(prompts))]
    outputs = engine.generate(prompts, sampling, json_schema=schema)
    complete = [o for o in outputs if o.finish_reason is not FinishReason.LENGTH]
    assert len(complete) >= len(outputs) // 2
    for output in complete:
        jsonschema.validate(json.loads(output.text), schema)


def test_a_free_row_beside_a_constrained_one_says_what_it_says_alone(engine: sgl.Engine) -> None:
    free = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    alone = engine.generate("The quick brown fox", free)

    import asyncio

    async def together() -> tuple:
        return await asyncio.gather(
            engine.generate_async("The quick brown fox", free),
            *[engine.generate_async("a", {"temperature": 0, "max_tokens": 16}, regex="a{5}") for _ in range(8)],
        )

    beside, *constrained = asyncio.run(together())
    assert beside.text == alone.text
    assert {o.text for o in constrained} == {"aaaaa"}


def test_regex_choice_and_grammar(engine: sgl.Engine) -> None:
    greedy = {"temperature": 0, "max_tokens": 32}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", engine.generate("Today is ", greedy, regex=r"\d{4}-\d{2}-\d{2}").text)
    assert engine.generate("Is fire hot? ", greedy, choices=["yes", "no"]).text in ("yes", "no")
    assert engine.generate("Sum: ", greedy, ebnf='root ::= "1" ("+" "1"){2}').text == "1+1+1"
