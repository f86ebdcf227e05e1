"""unevaluatedProperties and unevaluatedItems of a case: rules for the keys and items that nothing else in it looks at.

Within a case it is known which branches of a choice hold, and so which keywords look at what. It is not where another
branch of an anyOf may hold as well, or where a keyword was taken up that speaks of keys without naming its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglite.grammar.schema.cases import ARRAY, OBJECT, Case, Conjunction, Gap, ItemRule, KeyRule, Literal, Unlooked
from sglite.grammar.schema.document import Node
from sglite.grammar.schema.values import Json

if TYPE_CHECKING:
    from sglite.grammar.schema.expand import Expander

_UNKNOWN = "it depends on what other keywords have looked at"
_LOOKING = frozenset(
    {
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems",
        "additionalItems", "unevaluatedItems", "contains", "$ref", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_BESIDE = ("anyOf", "oneOf", "allOf", "if", "dependentSchemas", "dependencies")


def apply_unevaluated(expander: Expander, case: Case, literals: Conjunction) -> None:
    """Turn what `case.unlooked` says into rules of the case, or into gaps."""
    for found in case.unlooked:
        if len(case.unlooked) == 1 and literals == (found.node_id,) and _is_known(expander, case, found):
            _add_rule(expander, case, found)
        else:
            mask = OBJECT if found.keyword == "unevaluatedProperties" else ARRAY
            case.add_gap(Gap(mask, found.node_id, found.pointer, found.keyword, _UNKNOWN))
    case.unlooked = ()


def _add_rule(expander: Expander, case: Case, found: Unlooked) -> None:
    anything = expander.document.synthetic(True, expander.document.node(found.node_id))
    if found.keyword == "unevaluatedItems":
        items = [rule for rule in case.items if _asserts((*rule.prefix, rule.rest))]
        if all(rule.rest is None for rule in items):
            length = max((len(rule.prefix) for rule in items), default=0)
            case.items += (ItemRule((None,) * length, found.child),)
        return
    keys = [rule for rule in case.keys if _asserts((*rule.named.values(), rule.rest))]
    if all(rule.rest is None for rule in keys):
        named = {name: anything for rule in keys for name in rule.named}
        patterns = {pattern: anything for rule in keys for pattern, _ in rule.patterns}
        case.keys += (KeyRule(found.rank, named, tuple(patterns.items()), found.child),)


def _asserts(literals: tuple[Literal | None, ...]) -> bool:
    """The rule comes of a keyword that holds, and not of one that must not."""
    return all(literal is None or literal >= 0 for literal in literals)


def _is_known(expander: Expander, case: Case, found: Unlooked) -> bool:
    if found.keyword == "unevaluatedItems" and case.contains:
        return False
    kind = {"type": "object" if found.keyword == "unevaluatedProperties" else "array"}
    beside = (expander.document.synthetic(kind, expander.document.node(found.node_id)),)
    return all(_is_plain(expander, case, literal, beside) for literal in case.done)


def _is_plain(expander: Expander, case: Case, literal: Literal, beside: Conjunction) -> bool:
    """What the literal's own keywords look at shows in the case's rules, whatever else holds."""
    node = expander.document.node(max(literal, ~literal))
    if isinstance(node.value, bool):
        return True
    for keyword in expander.terms.keywords(node):
        if keyword == "not" or keyword in _BESIDE:
            is_shown = keyword != "not" and literal >= 0 and not expander.terms.speaks_of_presence(node, keyword)
            is_shown = is_shown and not (keyword == "if" and expander.terms.changes_nothing(node))
            if not is_shown and any(map(_looks, _children(node, keyword))):
                return False
            if is_shown and keyword == "anyOf" and not _others_are_settled(expander, case, node, beside):
                return False
    return True


def _others_are_settled(expander: Expander, case: Case, node: Node, beside: Conjunction) -> bool:
    """Each branch of the anyOf holds, does not, or looks at nothing."""
    branches = expander.terms.children(node, "anyOf")
    holding = [branch for branch in branches if branch in case.done]
    return all(
        branch in case.done
        or ~branch in case.done
        or not _looks(expander.document.node(branch).value)
        or any(expander.are_disjoint(branch, one, beside) for one in holding)
        for branch in branches
    )


def _children(node: Node, keyword: str) -> Iterator[Json]:
    value = node.keywords[keyword]
    if keyword == "if":
        yield from (node.keywords[name] for name in ("if", "then", "else") if name in node.keywords)
    elif isinstance(value, list):
        yield from value
    elif keyword in ("dependentSchemas", "dependencies") and isinstance(value, dict):
        yield from value.values()
    else:
        yield value


def _looks(value: Json) -> bool:
    """Somewhere in the schema a keyword looks at keys or items, or leads elsewhere."""
    if isinstance(value, dict):
        return not _LOOKING.isdisjoint(value) or any(map(_looks, value.values()))
    return isinstance(value, list) and any(map(_looks, value))
