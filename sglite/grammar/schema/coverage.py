"""What became of every assertion keyword of a schema, by JSON pointer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sglite.grammar.schema.cases import Gap
from sglite.grammar.schema.content import NAMED_SCHEMAS, SCHEMA, SCHEMAS
from sglite.grammar.schema.document import Document, Draft, Node, counting_keywords, escape, own_uri
from sglite.grammar.schema.formats import FORMAT_PATTERNS, IRREGULAR_FORMATS, NARROWED_FORMATS
from sglite.grammar.schema.terms import COMBINING, SAYS_SOMETHING, Terms
from sglite.grammar.schema.values import Json
from sglite.protocol import MOST_ITEMS, Coverage, CoverageItem

Status = Literal["mask", "rewritten", "redundant", "validated", "annotation", "unsupported"]
_NAMED = NAMED_SCHEMAS | {"$defs", "definitions"}
_HOLDING = SCHEMA | SCHEMAS | _NAMED | {"items"}
_ASSERTED_FORMATS = FORMAT_PATTERNS.keys() | IRREGULAR_FORMATS


def report(document: Document, terms: Terms, gaps: list[Gap]) -> Coverage:
    """Every assertion keyword in the document, reached or not; a keyword of a meta-schema only where it is a gap.

    In brief, as `Coverage.brief` has it, which spares a large schema the tenth part of its compile.
    """
    root = document.node(document.root).value
    walk = _subschemas(root, document.draft) if isinstance(root, dict) else iter(())
    subschemas: list[tuple[dict[str, Json], str, str]] = []
    count = 0
    for each in walk:
        subschemas.append(each)
        count += len(SAYS_SOMETHING.intersection(each[0]))
        if count > MOST_ITEMS and not gaps:
            return _coverage(())
    left_out = {(gap.node_id, gap.keyword): gap.reason for gap in gaps}
    items: list[CoverageItem] = []
    for value, pointer, inner in subschemas:
        node = document.known(value, inner, document.draft)
        reached = node if node is not None and node.id in terms.touched else None
        items += _items(value, pointer, document.draft, reached, left_out)
    seen = {item.pointer for item in items}
    items.extend(CoverageItem(g.pointer, g.keyword, "validated", g.reason) for g in gaps if g.pointer not in seen)
    return _coverage(tuple(items)).brief()


def _coverage(items: tuple[CoverageItem, ...]) -> Coverage:
    return Coverage(items=items, engine="llguidance", reason="the normalised schema as one exact grammar")


def _items(
    value: dict[str, Json], pointer: str, draft: Draft, node: Node | None, left_out: dict[tuple[int, str], str]
) -> list[CoverageItem]:
    counted = counting_keywords(value, draft)
    found: list[CoverageItem] = []
    for keyword in value:
        if keyword not in SAYS_SOMETHING:
            continue
        status, reason = _status(keyword, value, counted, node)
        if left_out and node is not None and (node.id, keyword) in left_out:
            status, reason = "validated", left_out[node.id, keyword]
        found.append(CoverageItem(f"{pointer}/{keyword}", keyword, status, reason))
    return found


def _status(keyword: str, value: dict[str, Json], counted: dict[str, Json], node: Node | None) -> tuple[Status, str]:
    if keyword not in counted:
        hidden = "$ref" in value and keyword != "$ref"
        return "annotation", "hidden by $ref in this draft" if hidden else "not a keyword of this draft"
    if keyword == "format" and value["format"] not in _ASSERTED_FORMATS:
        return "annotation", f"no known format: {value['format']!r}"
    if keyword == "required" and isinstance(value["required"], bool):
        return "annotation", "a list since draft 4"
    if node is None:
        return "redundant", "no value comes here"
    if keyword == "format" and value["format"] in NARROWED_FORMATS:
        return "mask", "a part of what the format allows, without what no regular language holds"
    return ("rewritten" if keyword in COMBINING else "mask"), ""


def _subschemas(root: dict[str, Json], draft: Draft) -> Iterator[tuple[dict[str, Json], str, str]]:
    """(subschema, its pointer, the base URI within it), from the root on, where a draft expects subschemas."""
    stack: list[tuple[Json, str, str]] = [(root, "", "")]
    while stack:
        value, pointer, base = stack.pop()
        if type(value) is not dict:
            continue
        inner = own_uri(value, base, draft)
        yield value, pointer, inner
        if _HOLDING.isdisjoint(value):
            continue
        children: list[tuple[Json, str, str]] = []
        for keyword, item in value.items():
            if keyword not in _HOLDING:
                continue
            below = f"{pointer}/{keyword}"
            if type(item) is dict:
                if keyword in _NAMED:
                    children += [(child, f"{below}/{escape(name)}", inner) for name, child in item.items()]
                elif keyword not in SCHEMAS:
                    children.append((item, below, inner))
            elif type(item) is list and (keyword in SCHEMAS or keyword == "items"):
                children += [(child, f"{below}/{i}", inner) for i, child in enumerate(item)]
        children.reverse()
        stack += children
