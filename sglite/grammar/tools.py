"""Answers that may hold tool calls: one grammar made of the exact grammars of the tools' schemas.

    must call                 calls
    may call, no answer       free text with calls in it: where a call's begin tag is complete the grammar takes hold.
                              Without a tag: calls | text that does not begin as a call of one of the tools does
    may call, or an answer    calls | the value of the answer's schema      never text that is neither

A call is written `begin {"name": NAME, KEY: ARGUMENTS} end`, the next one after `separator`; this is the text that chat
models were taught, so its skeleton has their blanks, and the arguments may have one after ':' and ','.

The spec's source is JSON of `ToolAnswer`, hence its own cache key, and is planned like every other one: in the worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from sglite.errors import GrammarError, InvalidGrammar, UnsupportedSchema
from sglite.grammar.reach import CONDITION
from sglite.grammar.residual.around import Around
from sglite.grammar.residual.rules import ResidualRules, united
from sglite.grammar.schema import prepare
from sglite.grammar.schema.types import PreparedSchema, SchemaLimits
from sglite.protocol import Coverage, CoverageItem, GrammarSpec, OnUnsupported, Whitespace


class ToolCall(msgspec.Struct, frozen=True):
    """One tool that may be called. `schema`: of its arguments, as JSON text; None: any object. `strict`: refuse a
    schema that cannot be enforced exactly; otherwise the coverage names what is not."""

    name: str
    schema: str | None
    strict: bool = False


class CallSyntax(msgspec.Struct, frozen=True):
    begin: str  # "": the call itself is the sign, and stands at the answer's start
    end: str
    key: str  # "arguments" or "parameters"
    separator: str


class AnswerSchema(msgspec.Struct, frozen=True):
    schema: str  # as JSON text
    whitespace: Whitespace = "compact"
    on_unsupported: OnUnsupported = "error"


class ToolAnswer(msgspec.Struct, frozen=True, kw_only=True):
    calls: tuple[ToolCall, ...]
    syntax: CallSyntax
    must_call: bool = False
    several: bool = True
    answer: AnswerSchema | None = None  # what the answer is where it is no call; None: text


def tools(answer: ToolAnswer) -> GrammarSpec:
    """Raises InvalidGrammar for a combination that has no grammar."""
    if not answer.calls:
        raise InvalidGrammar("there is no tool to call", param="tools")
    if not answer.must_call and not answer.syntax.begin and answer.answer is not None:
        raise InvalidGrammar("calls without a begin tag cannot be told from an answer that is JSON", param="tools")
    return GrammarSpec(kind="tools", source=msgspec.json.encode(answer).decode())


def lark_of(spec: GrammarSpec, *, limits: SchemaLimits) -> tuple[str, Coverage, ResidualRules | None]:
    """Raises UnsupportedSchema for a strict schema that cannot be enforced inside a call, and what `prepare` raises."""
    answer = msgspec.json.decode(spec.source, type=ToolAnswer)
    rules: list[str] = []
    items: list[CoverageItem] = []
    residual: list[ResidualRules | None] = []  # of each tool's arguments, then of the answer
    bare = not answer.must_call and not answer.syntax.begin
    for i, call in enumerate(answer.calls):
        arguments, found, followed = _arguments(call, f"args{i}", limits)
        items += found
        residual.append(followed)
        if bare:
            rules += [f"HEAD{i}: /{_bare_head(call.name, answer.syntax.key)}/", f"call{i}: HEAD{i} args{i} BARE_END"]
        else:
            rules.append(f'call{i}: {_literal(_head(call, answer.syntax))} args{i} "}}"')
        rules.append(arguments)
    rules.append("body: " + " | ".join(f"call{i}" for i in range(len(answer.calls))))
    if bare:
        rules += _calls_or_text(answer)
    elif answer.must_call or answer.answer is not None:
        rules += _calls_alone(answer)
    else:
        rules += _calls_in_text(answer)
    if answer.answer is not None:
        # A schema that cannot work is refused also where it is not used.
        text, found, followed = _answer(answer.answer, limits)
        if not answer.must_call:
            rules.append(text)
            items += found
            residual.append(followed)
    reason = "the exact grammars of the tools' schemas, put together"
    coverage = Coverage(items=tuple(items), engine="llguidance", reason=reason)
    return "\n".join(rules) + "\n", coverage, _followed(answer, residual)


def _head(call: ToolCall, syntax: CallSyntax) -> str:
    return json.dumps({"name": call.name})[:-1] + f', "{syntax.key}": '


def _followed(answer: ToolAnswer, parts: list[ResidualRules | None]) -> ResidualRules | None:
    """What is followed in the arguments and the answer, and how they are found within the text."""
    if not any(parts):
        return None
    rules, starts = united(parts)
    syntax = answer.syntax
    if answer.must_call or syntax.begin:
        begin = f"{syntax.begin}\n" if syntax.begin else ""
        markers = tuple(
            ((begin + _head(call, syntax)).rstrip().encode(), shape)
            for call, shape in zip(answer.calls, starts, strict=False)
        )
        has_answer = answer.answer is not None and not answer.must_call
        around = Around(markers=markers, answer=(syntax.begin.encode(), starts[-1]) if has_answer else None)
    else:
        between = rf"({_BLANK}{{0,4}}\}}{_BLANK}{{0,4}}{_escaped(syntax.separator)}{_BLANK}{{0,4}})?"
        heads = (_bare_head(call.name, syntax.key).removesuffix(_FEW) for call in answer.calls)
        around = Around(heads=tuple((between + head, shape) for head, shape in zip(heads, starts, strict=True)))
    return msgspec.structs.replace(rules, around=around)


def _calls_alone(answer: ToolAnswer) -> Iterator[str]:
    syntax = answer.syntax
    begin, end = (_literal(f"{syntax.begin}\n"), _literal(f"\n{syntax.end}")) if syntax.begin else ("", "")
    yield f"call: {begin} body {end}"
    yield "calls: call" + (f" ({_literal(syntax.separator)} call)*" if answer.several else "")
    yield "start: calls" + ("" if answer.must_call else " | answer")


def _calls_in_text(answer: ToolAnswer) -> Iterator[str]:
    """The lazy rule ends with the first complete tag; the text after the last call is text that has none."""
    tag = re.escape(answer.syntax.begin).replace("/", r"\/")
    end = _literal("\n" + answer.syntax.end)
    yield f"begin[lazy]: /(?s:.*){tag}/"
    yield f"TEXT: /(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/"
    yield f'marked: begin "\\n" body {end}'
    yield "start: marked* TEXT?" if answer.several else "start: TEXT? | marked"


# Who is not made to call writes calls with blanks of its own, and Llama 3.1 some with the type before the name.
_BLANK = r"[ \t\r\n]"
_TYPE = rf'("type"{_BLANK}*:{_BLANK}*"function"{_BLANK}*,{_BLANK}*)?'


_FEW = _BLANK + "{0,4}"


def _bare_head(name: str, key: str) -> str:
    few = _FEW
    type_ = _TYPE.replace(_BLANK + "*", few)
    return rf'{few}\{{{few}{type_}"name"{few}:{few}"{_escaped(name)}"{few},{few}"{key}"{few}:{few}'


def _calls_or_text(answer: ToolAnswer) -> Iterator[str]:
    """What begins as a call of a tool is one; everything else is text, other JSON included."""
    names = "|".join(_escaped(call.name) for call in answer.calls)
    begin = rf'{_BLANK}*\{{{_BLANK}*{_TYPE}"name"{_BLANK}*:{_BLANK}*"({names})"'
    yield f"BARE_END: /{_BLANK}{{0,4}}\\}}/"
    yield f"TEXT: /(?s:.+)/ & ~/{begin}(?s:.*)/"
    separator = f"/{_BLANK}{{0,4}}{_escaped(answer.syntax.separator)}{_BLANK}{{0,4}}/"
    yield "start: body" + (f" ({separator} body)*" if answer.several else "") + " | TEXT?"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


_SchemaRule = tuple[str, list[CoverageItem], ResidualRules | None]


def _arguments(call: ToolCall, rule: str, limits: SchemaLimits) -> _SchemaRule:
    if call.schema is None:
        prepared = prepare('{"type":"object"}', whitespace="single", limits=limits)
        return _rule(prepared, rule), [], prepared.residual
    try:
        return _schema_rule(call.schema, rule, "error" if call.strict else "validate", "single", limits)
    except GrammarError as error:
        error.param = f"tools.{call.name}"
        raise


def _answer(answer: AnswerSchema, limits: SchemaLimits) -> _SchemaRule:
    return _schema_rule(answer.schema, "answer", answer.on_unsupported, answer.whitespace, limits)


def _schema_rule(
    schema: str, rule: str, on_unsupported: OnUnsupported, whitespace: Whitespace, limits: SchemaLimits
) -> _SchemaRule:
    prepared = prepare(schema, on_unsupported=on_unsupported, whitespace=whitespace, limits=limits)
    # The answer as a whole is not validated, so what the mask does not carry is not carried at all.
    items = [
        msgspec.structs.replace(item, status="unsupported") if item.status == "validated" else item
        for item in prepared.coverage.items
    ]
    if prepared.residual is not None and prepared.residual.needs_end:
        reason = "where a number ends is not followed beside tool calls"
        if on_unsupported == "error":
            raise UnsupportedSchema(reason, pointer="", keyword="multipleOf")
        items.append(CoverageItem("", "multipleOf", "unsupported", reason))
    return _rule(prepared, rule), items, prepared.residual


_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|(?P<parameter>::\w+(?:\([^)\n]*\))?)|(?P<condition>""" + CONDITION + r""")"""
    r"""|(?P<directive>%[a-z]+)|(?P<special><[^\s>]+>)|(?P<comment>//[^\n]*)|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)


def _rule(prepared: PreparedSchema, rule: str) -> str:
    """The schema's Lark text with `start` called `rule` and its other names prefixed, so that several fit in one."""
    lark = prepared.lark
    pieces: list[str] = []
    in_attributes = False
    i = 0
    while i < len(lark):
        found = _TOKEN.match(lark, i)
        assert found is not None
        text = found[0]
        i += len(text)
        if text == "%json":
            _, end = json.JSONDecoder().raw_decode(lark, i + len(lark[i:]) - len(lark[i:].lstrip()))
            text, i = text + lark[i:end], end
        elif found.lastgroup == "name":
            # In `name[lazy, stop=...]:` the words are llguidance's.
            text = text if in_attributes else _prefixed(text, rule)
        elif text in "[]":
            in_attributes = text == "[" and bool(pieces) and (pieces[-1][-1:].isalnum() or pieces[-1][-1:] == "_")
        pieces.append(text)
    return "".join(pieces).strip()


def _prefixed(name: str, rule: str) -> str:
    if name == "start":
        return rule
    return f"{rule.upper()}_{name}" if name.lstrip("_")[:1].isupper() else f"{rule}_{name}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def closed(schema: Any) -> Any:
    """The schema with every plain object of it that says nothing of other keys closed to them.

    For arguments of tools whose author did not ask for strictness: what is declared is what may be given.
    """
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: closed(value) for name, value in made["properties"].items()}
        if not _OPENERS & made.keys():
            made["additionalProperties"] = False
    if isinstance(made.get("items"), dict):
        made["items"] = closed(made["items"])
    return made


_OPENERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf",
     "$ref", "$dynamicRef", "if", "not", "dependentSchemas", "dependencies", "minProperties"}
)  # fmt: skip
