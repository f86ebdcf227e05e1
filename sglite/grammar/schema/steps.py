"""What a keyword asks of a case: terms that hold together, and the options of a choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from sglite.errors import InvalidGrammar
from sglite.grammar.schema.cases import (
    Case,
    Gap,
    Literal,
    Rank,
)
from sglite.grammar.schema.document import Node
from sglite.grammar.schema.values import is_number


class Holds(msgspec.Struct, frozen=True):
    literal: Literal


class Step(msgspec.Struct, frozen=True):
    run: Callable[[Case, Rank], None]


class Choice(msgspec.Struct, frozen=True):
    """At least one option holds. `node_id` and `keyword`: who asked for it."""

    options: tuple[Option, ...]
    node_id: int
    pointer: str
    keyword: str


Term = Holds | Step | Choice
Option = tuple[Term, ...]


def expect(node: Node, keyword: str, kind: type) -> Any:
    """The keyword's value. Raises InvalidGrammar where it is of another kind."""
    value = node.keywords[keyword]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {dict: "an object", list: "an array", str: "a string", int: "a whole number", bool: "true or false"}
        raise misused(node, keyword, f"must be {words[kind]}")
    return value


def misused(node: Node, keyword: str, what: str) -> InvalidGrammar:
    """The error for a keyword whose value is none that it can have."""
    return InvalidGrammar(
        f"{keyword} at {node.pointer or '/'} {what}", pointer=f"{node.pointer}/{keyword}", keyword=keyword
    )


def count(node: Node, keyword: str) -> int:
    value = node.keywords[keyword]
    if not is_number(value) or value != int(value) or value < 0:
        raise misused(node, keyword, "must be a whole number, not negative")
    return int(value)


@lru_cache(maxsize=256)
def only(mask: int) -> Step:
    return Step(lambda case, _: case.narrow(mask))


def gap(node: Node, keyword: str, reason: str, mask: int) -> Step:
    found = Gap(mask, node.id, f"{node.pointer}/{keyword}", keyword, reason)
    return Step(lambda case, _: case.add_gap(found))
