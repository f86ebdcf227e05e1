"""What became of every assertion keyword of a schema."""

from __future__ import annotations

from sglite.grammar.schema.cases import Gap
from sglite.grammar.schema.document import Document
from sglite.grammar.schema.formats import FORMAT_PATTERNS, IRREGULAR_FORMATS
from sglite.grammar.schema.terms import COMBINING, SAYS_SOMETHING, Terms
from sglite.protocol import Coverage, CoverageItem


def report(document: Document, terms: Terms, gaps: dict[tuple[str, str], Gap]) -> Coverage:
    items: dict[str, CoverageItem] = {}
    for node in document.nodes():
        if isinstance(node.value, bool):
            continue
        counted = node.keywords
        for keyword in node.value:
            pointer = f"{node.pointer}/{keyword}"
            if keyword not in SAYS_SOMETHING or pointer in items:
                continue
            if keyword not in counted:
                items[pointer] = CoverageItem(pointer, keyword, "annotation", "says nothing here in this draft")
            elif keyword == "format" and node.value["format"] not in FORMAT_PATTERNS.keys() | IRREGULAR_FORMATS:
                items[pointer] = CoverageItem(
                    pointer, keyword, "annotation", f"unknown format {node.value['format']!r}"
                )
            elif node.id not in terms.touched:
                items[pointer] = CoverageItem(pointer, keyword, "redundant", "no value reaches it")
            else:
                status = "rewritten" if keyword in COMBINING else "mask"
                items[pointer] = CoverageItem(pointer, keyword, status)
    for gap in gaps.values():
        items[gap.pointer] = CoverageItem(gap.pointer, gap.keyword, "validated", gap.reason)
    return Coverage(
        items=tuple(items.values()), engine="llguidance", reason="the normalised schema as one exact grammar"
    )
