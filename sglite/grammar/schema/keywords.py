"""The keywords about one type each: what narrows a case when they hold, and how they can be violated.

ASSERTED: keyword -> (document, node) -> terms. DENIED: keyword -> (document, node) -> options, each of which
violates the keyword.
"""

from __future__ import annotations

from collections.abc import Callable

from sglite.grammar.schema import array_keywords, object_keywords, value_keywords
from sglite.grammar.schema.cases import (
    ARRAY,
    OBJECT,
    Case,
    Rank,
    Unlooked,
)
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.steps import Option, Step, Term, gap, only

_UNEVALUATED = {"unevaluatedItems": ARRAY, "unevaluatedProperties": OBJECT}


def _unevaluated(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        if node.keywords[keyword] is True:
            return []
        pointer, child = f"{node.pointer}/{keyword}", document.child(node, keyword)

        def run(case: Case, rank: Rank) -> None:
            case.unlooked += (Unlooked(node.id, pointer, keyword, child, rank),)

        return [Step(run)]

    return terms


def _not_unevaluated(keyword: str, mask: int) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        if node.keywords[keyword] is True:
            return []
        return [(only(mask), gap(node, keyword, "it depends on what other keywords have looked at", mask))]

    return options


ASSERTED: dict[str, Callable[[Document, Node], list[Term]]] = {
    **value_keywords.ASSERTED,
    **array_keywords.ASSERTED,
    **object_keywords.ASSERTED,
    **{k: _unevaluated(k) for k in _UNEVALUATED},
}

DENIED: dict[str, Callable[[Document, Node], list[Option]]] = {
    **value_keywords.DENIED,
    **array_keywords.DENIED,
    **object_keywords.DENIED,
    **{k: _not_unevaluated(k, mask) for k, mask in _UNEVALUATED.items()},
}
