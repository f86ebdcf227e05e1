"""Structural tags as Lark, so that the schemas inside them are as exact as schemas are elsewhere.

    const_string, regex, json_schema     a literal, the regex, our front end's grammar
    sequence, or, optional, plus, star   the same in Lark
    tag                                  begin content end; any_text as content ends at the first `end`
    triggered_tags                       free text up to a trigger, then one of the tags that begin so, again and again

Each schema and regex is a grammar of its own, named from the main one as `@part0`, so that names never meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
import msgspec

from sglite.errors import InvalidGrammar, UnsupportedSchema
from sglite.grammar.engines.forcing import unforced
from sglite.grammar.engines.fuse import fuse_delimiters
from sglite.grammar.residual.around import Around
from sglite.grammar.residual.rules import ResidualRules, united
from sglite.grammar.schema import prepare
from sglite.protocol import CoverageItem, GrammarSpec

Format = Mapping[str, Any]


class NotTranslated(Exception):
    """The tag uses a part that has no counterpart here; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def holds_schema(value: Any) -> bool:
    """Whether some part is a JSON schema, whatever its style."""
    if isinstance(value, dict):
        return "json_schema" in value or any(map(holds_schema, value.values()))
    return isinstance(value, list) and any(map(holds_schema, value))


def tags_to_lark(spec: GrammarSpec) -> tuple[str, tuple[CoverageItem, ...], ResidualRules | None]:
    """llguidance's serialised grammar, what became of each schema's keywords, and what is to be followed besides.

    Raises NotTranslated, InvalidGrammar or UnsupportedSchema.
    """
    translation = _Translation(spec)
    start = translation.format(json.loads(spec.source)["format"], "/format")
    translation.rules.insert(0, f"start: {start}")
    main = "\n".join(translation.rules) + "\n"
    if translation.holds_regex:
        main = unforced(main)
    grammars = [{"name": "main", "lark_grammar": main}, *translation.parts]
    residual = translation.residual()
    return json.dumps({"grammars": grammars}), tuple(translation.items), residual


class _Translation:
    def __init__(self, spec: GrammarSpec) -> None:
        self._spec = spec
        self.rules: list[str] = []
        self.parts: list[dict[str, str]] = []
        self.items: list[CoverageItem] = []
        self.holds_regex = False
        self._followed: list[tuple[str, str, ResidualRules | None]] = []  # a schema's pointer, the tag before it, rules
        self._may_hold_tags = False  # some text within tags may hold what looks like a tag

    def residual(self) -> ResidualRules | None:
        """Once all is translated. Raises UnsupportedSchema."""
        if not any(rules for _, _, rules in self._followed):
            return None
        begins = [begin for _, begin, _ in self._followed]
        exact = all(begins) and not self._may_hold_tags
        if exact and not any(a != b and a in b for a in begins for b in begins):
            rules, starts = united([rules for _, _, rules in self._followed])
            markers = dict(zip((begin.encode() for begin in begins), starts, strict=True))
            if len(markers) == len(begins):
                return msgspec.structs.replace(rules, around=Around(markers=tuple(markers.items())))
        for pointer, _, rules in self._followed:
            if rules is not None and rules.decides:
                reason = "it is not followed where a tag cannot be told from the text around"
                raise UnsupportedSchema(reason, pointer=pointer, keyword=rules.decides)
            if rules is not None:
                reason = "undeclared keys are not kept apart where a tag cannot be told from the text around"
                self.items.append(CoverageItem(pointer, "additionalProperties", "unsupported", reason))
        return None

    def format(self, given: Format, pointer: str) -> str:
        """A Lark expression for one format."""
        kinds: dict[Any, Callable[[Format, str], str]] = {
            "const_string": lambda given, _: _literal(_text(given, "value")),
            "regex": self._regex,
            "json_schema": self._json_schema,
            "sequence": lambda given, at: " ".join(self._elements(given, at)) or '""',
            "or": lambda given, at: "(" + " | ".join(self._elements(given, at)) + ")",
            "optional": lambda given, at: f"({self._content(given, at)})?",
            "plus": lambda given, at: f"({self._content(given, at)})+",
            "star": lambda given, at: f"({self._content(given, at)})*",
            "tag": lambda given, at: f"{_literal(_text(given, 'begin'))} {self._body(given, at)}",
            "triggered_tags": self._triggered_tags,
        }
        translate = kinds.get(given.get("type"))
        if translate is None:
            raise NotTranslated(f"{given.get('type')!r} at {pointer}")
        return translate(given, pointer)

    def _elements(self, given: Format, pointer: str) -> list[str]:
        elements = given.get("elements")
        if not isinstance(elements, list) or not elements:
            raise InvalidGrammar(f"the structural tag needs elements at {pointer}", param="structural_tag")
        return [self.format(_object(e, pointer), f"{pointer}/elements/{i}") for i, e in enumerate(elements)]

    def _content(self, given: Format, pointer: str) -> str:
        return self.format(_object(given.get("content"), pointer), f"{pointer}/content")

    def _regex(self, given: Format, pointer: str) -> str:
        self._may_hold_tags = self.holds_regex = True
        grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(_text(given, "pattern")))
        return self._part(grammar["grammars"][0]["lark_grammar"])

    def _json_schema(self, given: Format, pointer: str, begin: str = "") -> str:
        """`begin`: the text of the tag that it stands right behind."""
        if given.get("style", "json") != "json" or given.get("any_order"):
            raise NotTranslated(f"a json_schema of another style or order at {pointer}")
        at = f"{pointer}/json_schema"
        try:
            prepared = prepare(
                json.dumps(given.get("json_schema")),
                on_unsupported=self._spec.on_unsupported,
                whitespace=self._spec.whitespace,
            )
        except UnsupportedSchema as error:
            raise UnsupportedSchema(error.reason, pointer=at + error.pointer, keyword=error.keyword) from error
        if (prepared.residual is not None and prepared.residual.needs_end) or not prepared.coverage.exact:
            raise UnsupportedSchema("within a tag nothing is checked afterwards", pointer=at, keyword="json_schema")
        self.items += (CoverageItem(at + i.pointer, i.keyword, i.status, i.reason) for i in prepared.coverage.items)
        self._followed.append((at, begin, prepared.residual))
        return self._part(fuse_delimiters(prepared.lark))

    def _body(self, tag: Format, pointer: str) -> str:
        """Content and end of a tag."""
        ends = tag.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends) or not ends:
            raise NotTranslated(f"an end that is no text at {pointer}")
        content = _object(tag.get("content"), pointer)
        if content.get("type") != "any_text":
            closing = " | ".join(_literal(end) for end in ends)
            at = f"{pointer}/content"
            if content.get("type") == "json_schema":
                return f"{self._json_schema(content, at, _text(tag, 'begin'))} ({closing})"
            return f"{self.format(content, at)} ({closing})"
        self._may_hold_tags = True
        if not all(ends) or any(content.get(name) for name in ("excludes", "max_tokens", "max_chars")):
            raise NotTranslated(f"a bounded any_text at {pointer}")
        return self._until(ends)

    def _triggered_tags(self, given: Format, pointer: str) -> str:
        tags = [_object(tag, pointer) for tag in given.get("tags") or []]
        triggers = given.get("triggers")
        if not tags or not isinstance(triggers, list) or not triggers or given.get("excludes"):
            raise NotTranslated(f"triggered_tags with excludes, or without tags or triggers, at {pointer}")
        segments: list[str] = []
        for trigger in triggers:
            group = [
                f"{_literal(_text(tag, 'begin')[len(trigger) :])} {self._body(tag, f'{pointer}/tags/{i}')}"
                for i, tag in enumerate(tags)
                if _text(tag, "begin").startswith(trigger)
            ]
            if group:
                segments.append(f"{self._until([trigger])} ({' | '.join(group)})")
        if len(segments) < len(triggers) or sum(_text(t, "begin").startswith(tuple(triggers)) for t in tags) < len(
            tags
        ):
            raise InvalidGrammar("every trigger must begin a tag, and every tag with a trigger", param="structural_tag")
        one = f"({' | '.join(segments)})"
        never = self._terminal(f"/(?s:.+)/ & ~/(?s:.*)(?:{'|'.join(map(_escaped, triggers))})(?s:.*)/")
        if given.get("stop_after_first"):
            return one if given.get("at_least_one") else f"({one} | {never}?)"
        return f"{one}{'+' if given.get('at_least_one') else '*'} {never}?"

    def _until(self, ends: Sequence[str]) -> str:
        """Free text up to and with the first of `ends`."""
        return self._terminal(f"/(?s:.*)(?:{'|'.join(map(_escaped, ends))})/", lazy=True)

    def _terminal(self, expression: str, *, lazy: bool = False) -> str:
        name = f"until{len(self.rules)}" if lazy else f"TEXT{len(self.rules)}"  # only rules may be lazy
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def _part(self, lark: str) -> str:
        name = f"part{len(self.parts)}"
        self.parts.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", lambda char: f"\\x{{{ord(char[0]):x}}}", text)


def _text(given: Format, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise NotTranslated(f"a {name} that is no text")
    return value


def _object(value: Any, pointer: str) -> Format:
    if not isinstance(value, dict):
        raise InvalidGrammar(f"the structural tag needs an object at {pointer}", param="structural_tag")
    return value
