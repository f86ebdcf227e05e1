"""A schema document: its draft, its nodes by number, and where each reference leads.

A node is one subschema (a dict or a boolean) at one place. Nothing is ever fetched: a reference leads into
the document, to a meta-schema that ships with `jsonschema_specifications`, or is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec
from jsonschema_specifications import REGISTRY

from sglite.errors import InvalidGrammar, UnsupportedSchema
from sglite.grammar.schema.content import Contents
from sglite.grammar.schema.values import Json, parse_json

Pointer = tuple[str | int, ...]


_SINCE_6 = frozenset({"const", "contains", "propertyNames"})
_SINCE_7 = frozenset({"if", "then", "else"})
_SINCE_2019 = frozenset(
    {"dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"}
    | {"$recursiveRef"}
)
_SINCE_2020 = frozenset({"prefixItems", "$dynamicRef"})


def _hidden_keywords(draft: int) -> frozenset[str]:
    """Keywords that the draft does not know: annotations there, whatever they mean elsewhere."""
    hidden: frozenset[str] = frozenset()
    for first, keywords in ((6, _SINCE_6), (7, _SINCE_7), (2019, _SINCE_2019), (2020, _SINCE_2020)):
        if draft < first:
            hidden |= keywords
    return hidden | {"dependencies"} if draft in (2019, 2020) else hidden


class Draft(IntEnum):
    """Ordered, so that "since draft 6" is a comparison. UNSAID: no $schema; 2020-12 with the older forms understood."""

    D4 = 4
    D6 = 6
    D7 = 7
    D2019 = 2019
    D2020 = 2020
    UNSAID = 9999

    ref_hides_siblings: bool  # kept, as the next: Enum's own ways take a microsecond, and each subschema asks
    hidden: frozenset[str]  # keywords that it does not know

    def __init__(self, number: int) -> None:
        self.ref_hides_siblings = number <= 7
        self.hidden = _hidden_keywords(number)

    __hash__ = int.__hash__


_D4 = Draft.D4
_DRAFTS = {
    "draft-03": Draft.D4,
    "draft-04": Draft.D4,
    "draft-05": Draft.D4,
    "draft-06": Draft.D6,
    "draft-07": Draft.D7,
    "2019-09": Draft.D2019,
    "2020-12": Draft.D2020,
}
_DRAFT_URI = re.compile(r"^https?://json-schema\.org/(?:draft/)?(draft-0[3-7]|2019-09|2020-12)/(?:hyper-)?schema#?$")

# Keywords whose value is no schema: nothing below them is a resource, an anchor or a node.
_OPAQUE = frozenset({"enum", "const", "default", "examples", "example", "required", "description", "title"})


class Node(msgspec.Struct, frozen=True):
    id: int
    value: dict[str, Json] | bool
    pointer: str  # as reported, e.g. "/properties/a"; a meta-schema's begins with its URI
    base: str  # the URI that references inside are relative to
    draft: Draft
    keywords: dict[str, Json]  # those of `value` that count in the draft


@dataclass
class Resource:
    root: Json
    pointer: str
    outer: str  # the base URI around the root, before its own $id
    anchors: dict[str, tuple[Json, str, str]] = field(default_factory=dict)  # name -> (value, pointer, outer base)


class Document:
    """`node(0)` is the root. Nodes are made on first use; places that say the same are one node (content.py)."""

    def __init__(self, root: Json) -> None:
        if not isinstance(root, dict | bool):
            raise InvalidGrammar("a schema is a JSON object or a boolean", pointer="")
        self.draft = declared_draft(root)
        self._nodes: list[Node] = []
        self._contents = Contents()
        self._by_content: dict[Hashable, int] = {}
        self._by_place: dict[tuple[int, str, Draft], int] = {}  # by the id() of a value, and what it is read with
        self._pinned: list[Any] = []  # values outside of the document: keeps what is known by place alive
        self._resources: dict[str, Resource] = {}
        self._targets: dict[int, int] = {}
        self._holders: dict[tuple[int, str], tuple[Any, str] | None] = {}  # see _holder
        self._base = own_uri(root, "", self.draft) if isinstance(root, dict) else ""
        self._root = Resource(root, "", "")
        self._resources[""] = self._resources[self._base] = self._root
        self._is_indexed = False
        self.root = self._intern(root, "", "", self.draft)

    def node(self, node_id: int) -> Node:
        return self._nodes[node_id]

    def known(self, value: dict[str, Json], inner: str, draft: Draft) -> Node | None:
        """The node of a subschema, where something has asked for it or for one that says the same. `inner`: the base
        URI within it."""
        found = self._by_content.get((self._contents.number(value), inner, draft))
        return None if found is None else self._nodes[found]

    def child(self, parent: Node, *path: str | int) -> int:
        """The node at `path` below `parent`. Raises InvalidGrammar where no schema is there."""
        value: Any = parent.value
        for step in path:
            value = value[step]
        return self._intern(value, parent.pointer, parent.base, parent.draft, path)

    def children(self, parent: Node, keyword: str, members: dict[str, Json]) -> dict[str, int]:
        """The nodes at `members`, the value of a keyword."""
        known, base, draft = self._by_place, parent.base, parent.draft
        found: dict[str, int] = {}
        for name, value in members.items():
            child = known.get((id(value), base, draft))
            if child is None:
                child = self._intern(value, parent.pointer, base, draft, (keyword, name))
            found[name] = child
        return found

    def without(self, node: Node, keyword: str) -> int:
        """A node that says all that `node` does but for one keyword."""
        value = {k: v for k, v in node.keywords.items() if k != keyword}
        self._pinned.append(value)
        return self._intern(value, node.pointer, node.base, node.draft)

    def synthetic(self, value: Json, near: Node) -> int:
        """A node that does not stand in the document but acts for the keyword at `near`."""
        if isinstance(value, dict):
            self._pinned.append(value)
        return self._intern(value, near.pointer, near.base, Draft.UNSAID)

    def target(self, node: Node, keyword: str) -> int:
        """The node that `node[keyword]` ($ref, $dynamicRef, $recursiveRef) refers to."""
        if keyword == "$recursiveRef":
            return self.root
        if node.id not in self._targets:
            self._targets[node.id] = self._resolve(node, keyword)
        return self._targets[node.id]

    def _intern(self, value: Json, pointer: str, base: str, draft: Draft, path: Sequence[str | int] = ()) -> int:
        """`path`: from `pointer` to the value."""
        place = (id(value), base, draft)
        found = self._by_place.get(place)
        if found is not None:
            return found
        if type(value) is dict:
            base = own_uri(value, base, draft)
        elif isinstance(value, bool):
            base = ""
        else:
            where = pointer + joined(path)
            raise InvalidGrammar(f"at {where or '/'} there must be a schema (an object or a boolean)", pointer=where)
        content = (self._contents.number(value), base, draft)
        found = self._by_content.get(content)
        if found is None:
            found = self._by_content[content] = self._add(value, pointer + joined(path), base, draft)
        self._by_place[place] = found
        return found

    def _add(self, value: dict[str, Json] | bool, pointer: str, base: str, draft: Draft) -> int:
        keywords = {} if isinstance(value, bool) else counting_keywords(value, draft)
        self._nodes.append(Node(len(self._nodes), value, pointer, base, draft, keywords))
        return len(self._nodes) - 1

    def _index(self, resource: Resource, base: str, draft: Draft) -> None:
        """Note every $id and $anchor below the resource's root, whose own base is `base`."""
        stack: list[tuple[Json, str, str, Resource]] = [(resource.root, resource.pointer, resource.outer, resource)]
        while stack:
            value, pointer, outer, within = stack.pop()
            if isinstance(value, list):
                stack.extend((item, f"{pointer}/{i}", outer, within) for i, item in enumerate(value))
                continue
            if not isinstance(value, dict):
                continue
            inner = base if value is resource.root else own_uri(value, outer, draft)
            if inner != outer and value is not resource.root:
                within = Resource(value, pointer, outer)
                self._resources.setdefault(inner, within)
            for name in anchor_names(value, draft):
                within.anchors.setdefault(name, (value, pointer, outer))
            for key, item in value.items():
                if isinstance(item, dict | list) and key not in _OPAQUE:
                    stack.append((item, f"{pointer}/{escape(key)}", inner, within))

    def _resolve(self, node: Node, keyword: str) -> int:
        assert isinstance(node.value, dict)
        reference = node.value[keyword]
        if not isinstance(reference, str):
            raise InvalidGrammar(
                f"{keyword} at {node.pointer or '/'} must be a string",
                pointer=f"{node.pointer}/{keyword}",
                keyword=keyword,
            )
        uri, fragment = _split(node.base, reference)
        if not self._is_indexed and (uri not in ("", self._base) or (fragment and not fragment.startswith("/"))):
            self._index(self._root, self._base, self.draft)
            self._is_indexed = True
        resources = [r for r in (self._resource(uri), self._root if reference.startswith("#") else None) if r]
        for resource in resources:
            found = self._locate(resource, fragment)
            if found is not None:
                return found
        where = "leads outside the document, and nothing is fetched" if not resources else "leads nowhere"
        raise UnsupportedSchema(f"{reference!r} {where}", pointer=f"{node.pointer}/{keyword}", keyword=keyword)

    def _resource(self, uri: str) -> Resource | None:
        if uri in self._resources:
            return self._resources[uri]
        if uri not in REGISTRY and uri + "#" not in REGISTRY:
            return None
        contents = REGISTRY[uri if uri in REGISTRY else uri + "#"].contents
        root = parse_json(json.dumps(contents))
        resource = self._resources[uri] = Resource(root, uri, "")
        self._pinned.append(root)
        self._index(resource, uri, declared_draft(root))
        return resource

    def _locate(self, resource: Resource, fragment: str) -> int | None:
        draft = self.draft if resource is self._root else declared_draft(resource.root, self.draft)
        if fragment and not fragment.startswith("/"):
            if fragment not in resource.anchors:
                return None
            value, pointer, outer = resource.anchors[fragment]
            return self._intern(value, pointer, outer, draft)
        if not fragment:
            return self._intern(resource.root, resource.pointer, resource.outer, draft)
        holder, _, last = fragment.rpartition("/")
        place = self._holder(resource, holder, draft)
        place = None if place is None else _below(*place, unescape(last), draft)
        if place is None:
            return None
        found = self._by_place.get((id(place[0]), place[1], draft))
        if found is not None:
            return found
        steps = [unescape(step) for step in fragment.split("/")[1:]]
        return self._intern(place[0], resource.pointer, place[1], draft, steps)

    def _holder(self, resource: Resource, fragment: str, draft: Draft) -> tuple[Any, str] | None:
        """What stands at a JSON pointer, with the base URI around it: most references lead below a few places."""
        key = (id(resource), fragment)
        if key not in self._holders:
            place: tuple[Any, str] | None = resource.root, resource.outer
            for step in fragment.split("/")[1:]:
                place = None if place is None else _below(*place, unescape(step), draft)
            self._holders[key] = place
        return self._holders[key]


def _below(value: Any, base: str, step: str, draft: Draft) -> tuple[Any, str] | None:
    """A member or item of `value`, with the base URI around it."""
    if isinstance(value, dict) and step in value:
        return value[step], own_uri(value, base, draft)
    if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
        return value[int(step)], base
    return None


def _split(base: str, reference: str) -> tuple[str, str]:
    """The absolute URI of a reference and its fragment, decoded."""
    if reference[:1] == "#" and reference.isprintable():
        return _without_fragment(base), unquote(reference[1:])
    uri, fragment = urldefrag(join(base, reference))
    return uri, unquote(fragment)


@lru_cache(maxsize=256)
def _without_fragment(base: str) -> str:
    return urldefrag(join(base, "#"))[0]


def declared_draft(root: Json, default: Draft = Draft.UNSAID) -> Draft:
    """The draft that `$schema` names. An unknown dialect is read as the default."""
    said = root.get("$schema") if isinstance(root, dict) else None
    found = _DRAFT_URI.match(said.strip()) if isinstance(said, str) else None
    return _DRAFTS[found.group(1)] if found else default


def own_uri(value: dict[str, Json], base: str, draft: Draft) -> str:
    """The base URI within a schema: its own $id (id before draft 6) or the surrounding one."""
    said = value.get("id" if draft is _D4 else "$id")
    if said is None or not isinstance(said, str) or said.startswith("#"):
        return base
    if "$ref" in value and draft.ref_hides_siblings:
        return base
    return urldefrag(join(base, said))[0]


def anchor_names(value: dict[str, Json], draft: Draft) -> list[str]:
    names = [value[k] for k in ("$anchor", "$dynamicAnchor") if isinstance(value.get(k), str)]
    said = value.get("id" if draft == Draft.D4 else "$id")
    if isinstance(said, str) and said.startswith("#") and len(said) > 1:
        names.append(said[1:])
    return names


def join(base: str, reference: str) -> str:
    """urljoin that also keeps a fragment below a base such as "urn:x" which has no path to join with."""
    if reference.startswith("#"):
        return urldefrag(base)[0] + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def joined(steps: Iterable[str | int]) -> str:
    return "".join(["/" + escape(step) for step in steps])


def escape(step: str | int) -> str:
    text = str(step)
    return text.replace("~", "~0").replace("/", "~1") if "~" in text or "/" in text else text


def unescape(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def counting_keywords(value: dict[str, Json], draft: Draft) -> dict[str, Json]:
    """The members of a schema that its draft knows or leaves to others."""
    if "$ref" in value and draft.ref_hides_siblings:
        return {"$ref": value["$ref"]}
    hidden = draft.hidden
    return value if hidden.isdisjoint(value) else {k: v for k, v in value.items() if k not in hidden}
