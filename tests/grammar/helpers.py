"""What the grammar tests share: specs of every kind, and walks through a matcher."""

from __future__ import annotations

import random

import numpy as np

from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import GrammarCompiler
from sglite.grammar.matcher import Matcher
from sglite.protocol import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "extra": {"type": ["number", "null", "boolean"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

SPECS: dict[str, GrammarSpec] = {
    "json_schema": spec.json_schema(PERSON),
    "json_object": spec.json_object(),
    "regex": spec.regex(r"(ab|a{3}|[x-z]+é)?-[0-9]{2,4}"),
    "choice": spec.choice(["yes", "yellow", "no", "北京", 'say "hi"']),
    "lark": spec.lark('start: "<" NAME ">" body "</end>"\nNAME: /[a-z]{1,8}/\nbody: (/[0-9]+/ ",")*'),
    "ebnf": spec.ebnf('root ::= "{" pair ("," pair)* "}"\npair ::= [a-c]+ ":" ("true" | "false" | [0-9]+)'),
}


def whole(compiler: GrammarCompiler, grammar: GrammarSpec, text: str | bytes) -> bool:
    """Whether the constraint takes the whole text, and then the end; any split into tokens counts the same."""
    matcher = compiler.compile_now(grammar).matcher()
    data = text.encode() if isinstance(text, str) else text
    token_ids = [compiler.vocab.with_bytes(bytes([byte]))[0] for byte in data]
    return matcher.accept(token_ids) == len(token_ids) and matcher.can_stop


def legal(matcher: Matcher, size: int) -> list[int]:
    row = bitmask.empty(size)
    matcher.fill(row)
    return bitmask.ids(row).tolist()


def row_of(matcher: Matcher, size: int) -> np.ndarray:
    row = bitmask.empty(size)
    matcher.fill(row)
    return row


def random_walk(matcher: Matcher, size: int, *, steps: int, rng: random.Random) -> list[int]:
    """Accept random legal tokens, at most `steps`, until a stop id; returns them."""
    walked: list[int] = []
    for _ in range(steps):
        if matcher.finished:
            break
        token_id = rng.choice(legal(matcher, size))
        assert matcher.accept([token_id]) == 1, "the mask allowed what accept refused"
        walked.append(token_id)
    return walked
