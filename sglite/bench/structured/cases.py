"""The schemas and mixes. All ask for more than the tokens of an answer, so that rates are over answers of one length.

mixP_N      N rows, P percent of them under SCHEMA of the offline bench, the others free
extract_N   ten-field objects; its numbers have no bounds, which a model without sense fills with digits
keys_N      the same ten keys with values as short as those of real records: key-heavy
calls_N     function calls: a choice of tools, each with arguments of its own
strings_N   long bounded strings
deep_N      alternatives within alternatives
untuned_N   a schema that nothing was tuned on (a package manifest)
..._NxK     N rows at any time, K answers a row one after the other: forced text lets some rows end early, and where
            each has one answer, the last rows of a run are few
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from sglite.bench.workloads import SCHEMA
from sglite.errors import InvalidRequest

Schema = dict[str, Any]


def closed(properties: dict[str, Any], required: list[str] | None = None) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def many(item: Schema) -> Schema:
    return {"type": "array", "minItems": 64, "items": item}


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


_NUMBER, _INTEGER, _YES = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}

EXTRACT = many(
    closed(
        {
            "invoice_number": _text(12), "customer_name": _text(20), "billing_country": {"enum": ["DE", "FR", "US"]},
            "issue_date": {"type": "string", "format": "date"}, "due_date": {"type": "string", "format": "date"},
            "net_amount": _NUMBER, "tax_amount": _NUMBER, "currency_code": {"enum": ["EUR", "USD"]}, "is_paid": _YES,
            "line_item_count": _INTEGER,
        }
    )
)  # fmt: skip

KEYS = many(
    closed(
        {
            "invoice_number": _text(10), "customer_name": _text(16), "billing_country": {"enum": ["DE", "FR", "US"]},
            "issue_date": {"type": "string", "format": "date"}, "due_date": {"type": "string", "format": "date"},
            "net_amount": {"type": "integer", "minimum": 0, "maximum": 99999},
            "tax_amount": {"type": "integer", "minimum": 0, "maximum": 99999},
            "currency_code": {"enum": ["EUR", "USD"]}, "is_paid": _YES,
            "line_item_count": {"type": "integer", "minimum": 1, "maximum": 99},
        }
    )
)  # fmt: skip

_TOOLS: dict[str, Schema] = {
    "search_documents": closed({"query": _text(40), "max_results": {"type": "integer", "minimum": 1, "maximum": 50}}),
    "send_message": closed({"recipient_address": _text(30), "subject_line": _text(30), "message_body": _text(80)}),
    "create_calendar_event": closed(
        {"title": _text(30), "start_time": {"type": "string", "format": "date-time"}, "duration_minutes": _INTEGER}
    ),
}
CALLS = many(
    {"anyOf": [closed({"name": {"const": name}, "arguments": arguments}) for name, arguments in _TOOLS.items()]}
)

STRINGS = many(closed({"summary": _text(400), "quote": {"type": "string", "minLength": 5, "maxLength": 60}}))


def _deep(levels: int) -> Schema:
    if not levels:
        return {"anyOf": [_text(16), _INTEGER, {"type": "null"}]}
    inner = _deep(levels - 1)
    return {
        "anyOf": [
            closed({"kind": {"const": f"left{levels}"}, "left_branch": inner}),
            closed({"kind": {"const": f"right{levels}"}, "right_branch": inner, "weight": _NUMBER}),
            {"type": "array", "items": inner, "minItems": 1, "maxItems": 3},
        ]
    }


DEEP = many(_deep(4))

UNTUNED = many(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^(?:@[a-z0-9-]+/)?[a-z0-9-]+$", "maxLength": 60},
            "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            "private": _YES,
            "keywords": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 6},
            "scripts": {"type": "object", "additionalProperties": {"type": "string"}},
            "engines": closed({"node": {"type": "string"}, "npm": {"type": "string"}}, ["node"]),
            "repository": {
                "oneOf": [{"type": "string", "format": "uri"}, closed({"type": {"const": "git"}, "url": _text(80)})]
            },
        },
        "required": ["name", "version"],
        "additionalProperties": {"type": ["string", "number", "null"]},
    }
)

SCHEMAS: dict[str, Schema] = {
    "mix": SCHEMA, "extract": EXTRACT, "keys": KEYS, "calls": CALLS, "strings": STRINGS, "deep": DEEP,
    "untuned": UNTUNED,
}  # fmt: skip
_NAME = re.compile(r"(mix(\d+)|extract|keys|calls|strings|deep|untuned)_(\d+)(?:x(\d+))?")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    bound: int  # rows that are constrained: the first ones
    schema: Schema
    prompt: int = 128
    output: int = 256
    rounds: int = 1  # answers of each row

    def prompts(self, vocab_size: int, *, seed: str) -> list[tuple[int, ...]]:
        """`rounds` times one for each row."""
        draw = random.Random(f"{self.name}/{seed}")
        return [tuple(draw.randrange(vocab_size) for _ in range(self.prompt)) for _ in range(self.rows * self.rounds)]


def case(name: str) -> Case:
    """Raises InvalidRequest for a name that is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidRequest(f"no case {name!r}; there are mixP_N and {', '.join(list(SCHEMAS)[1:])} with _N rows")
    rows, rounds = int(match[3]), int(match[4] or 1)
    if match[2] is not None:
        return Case(name, rows, round(rows * int(match[2]) / 100), SCHEMA, rounds=rounds)
    return Case(name, rows, rows, SCHEMAS[match[1]], rounds=rounds)
