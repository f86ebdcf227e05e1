"""Every rule of a grammar must be able to end, and soon.

xgrammar looks ahead for forced text without a bound, so `root ::= "a" root` would never return. In a grammar whose
every part has a finite shortest text, any forced text ends; and it ends within the bound that is checked here.

    shortest(string) = its bytes    shortest(choice) = least of its parts    shortest(sequence) = sum of its parts
    shortest(rule) = shortest(body), the least fixed point
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence

from sglite.errors import GrammarTooLarge, InvalidGrammar

MAX_SHORTEST_BYTES = 16_384  # of any part of a grammar

# Kinds of expression in xgrammar's serialised form (version v18, before optimisation): kind, length, data.
_BYTES, _CLASS, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 4, 5, 6, 8


def check(serialised: str) -> None:
    """`serialised`: what xgrammar's `Grammar.serialize_json` gave. Raises InvalidGrammar or GrammarTooLarge."""
    grammar = json.loads(serialised)
    flat, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    expressions = [flat[begin + 2 : begin + 2 + flat[begin + 1]] for begin in starts if begin < len(flat)]
    kinds = [flat[begin] for begin in starts if begin < len(flat)]
    names = [rule[0] for rule in grammar["rules"]]
    bodies = [rule[1] for rule in grammar["rules"]]
    shortest = _shortest(kinds, expressions, bodies)
    for name, body in zip(names, bodies, strict=True):
        _check_length(shortest[body], f"rule {name!r}")
    for length in shortest:
        _check_length(length, "a part of the grammar")


def _shortest(kinds: Sequence[int], expressions: Sequence[list[int]], bodies: Sequence[int]) -> list[float]:
    """Bytes of each expression's shortest text; inf where there is none.

    Knuth's generalisation of Dijkstra's algorithm (Information Processing Letters 6, 1977): an expression is settled
    in the order of its length, once what it needs is settled.
    """
    parts = [_parts(kind, data, bodies) for kind, data in zip(kinds, expressions, strict=True)]
    users: list[list[int]] = [[] for _ in kinds]
    for i, needed in enumerate(parts):
        for part in needed:
            users[part].append(i)
    missing = [min(len(p), 1) if k == _CHOICES else len(p) for k, p in zip(kinds, parts, strict=True)]
    length = [math.inf] * len(kinds)
    heap = [(_fixed(kinds[i], expressions[i]), i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(heap)
    while heap:
        found, i = heapq.heappop(heap)
        if found >= length[i]:
            continue
        length[i] = found
        for user in users[i]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(heap, (_made_of(kinds[user], expressions[user], [length[p] for p in parts[user]]), user))
    return length


def _parts(kind: int, data: list[int], bodies: Sequence[int]) -> list[int]:
    """Expressions that the length of this one is computed from."""
    if kind == _RULE or (kind == _REPEAT and data[1] > 0):
        return [bodies[data[0]]]
    return data if kind in (_SEQUENCE, _CHOICES) else []


def _fixed(kind: int, data: list[int]) -> float:
    """Of an expression without parts. What is not named may be empty: a starred class, free text up to a tag."""
    return len(data) if kind == _BYTES else 1 if kind == _CLASS else 0


def _made_of(kind: int, data: list[int], lengths: list[float]) -> float:
    if kind == _REPEAT:
        return data[1] * lengths[0]
    return min(lengths) if kind == _CHOICES else sum(lengths)


def _check_length(length: float, what: str) -> None:
    if math.isinf(length):
        raise InvalidGrammar(f"{what} can never end: every way through it needs itself again")
    if length > MAX_SHORTEST_BYTES:
        raise GrammarTooLarge(f"{what} needs at least {length:.0f} bytes of text; {MAX_SHORTEST_BYTES} is the limit")
