"""The grammar of an answer that may hold tool calls: one Lark text made of the exact grammars of its schemas.

choice none               the answer's own constraint
choice required / named   calls
choice auto, no schema    free text with calls in it (the call's begin tag is where the grammar takes hold)
choice auto and a schema  calls | the schema's value      never text that is neither
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglite.errors import GrammarError, InvalidRequest
from sglite.grammar import spec as grammar_spec
from sglite.grammar.schema import prepare
from sglite.protocol import CoverageItem, GrammarSpec, OnUnsupported
from sglite.runtime.server.chat.parts import CallSyntax
from sglite.runtime.server.chat.tools import TAGGED, Tool, ToolChoice

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<name>!?[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|(?P<directive>%[a-z]+)|(?P<comment>//[^\n]*)|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    spec: GrammarSpec | None
    syntax: CallSyntax  # of the calls in this answer
    unenforced: tuple[CoverageItem, ...] = ()  # what the tools' schemas say and the mask does not carry


def answer_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    syntax: CallSyntax,
    strictness: str,
    answer: GrammarSpec | None,
) -> AnswerGrammar:
    """Raises UnsupportedSchema for a strict tool whose schema cannot be enforced, InvalidRequest for tools beside
    a constraint that is no schema."""
    if not tools or choice.mode == "none":
        return AnswerGrammar(answer, syntax)
    if choice.mode == "auto" and answer is None and strictness == "never":
        return AnswerGrammar(None, syntax)
    if answer is not None:
        if answer.kind not in ("json_schema", "json_object"):
            raise InvalidRequest(f"tools cannot be combined with a {answer.kind} constraint", param="tools")
        syntax = TAGGED  # a bare call and a bare JSON answer could be the same text
    if choice.mode == "auto" and answer is None and not syntax.begin:
        # Free text that may not begin like a call is not what such a model was taught; only whole calls are bound.
        return AnswerGrammar(None, syntax)
    callable_tools = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    return _compose(callable_tools, choice, syntax, strictness, answer)


def _compose(
    tools: Sequence[Tool], choice: ToolChoice, syntax: CallSyntax, strictness: str, answer: GrammarSpec | None
) -> AnswerGrammar:
    rules: list[str] = []
    unenforced: list[CoverageItem] = []
    for i, tool in enumerate(tools):
        arguments, items = _arguments(tool, f"args{i}", strictness)
        unenforced += items
        head = json.dumps({"name": tool.name})[:-1] + f', "{syntax.key}": '
        rules += [f'call{i}: {_literal(head)} args{i} "}}"', arguments]
    rules.append("body: " + " | ".join(f"call{i}" for i in range(len(tools))))
    parallel = choice.parallel and choice.mode != "named"
    if choice.mode == "auto" and answer is None:
        rules += _free_text_with_calls(syntax, parallel=parallel)
    else:
        begin, end = (f"{syntax.begin}\n", f"\n{syntax.end}") if syntax.begin else ("", "")
        rules.append("call: " + " ".join(filter(None, [begin and _literal(begin), "body", end and _literal(end)])))
        rules.append("calls: call" + (f" ({_literal(syntax.separator)} call)*" if parallel else ""))
        rules.append("start: calls" + (" | answer" if choice.mode == "auto" else ""))
        if choice.mode == "auto" and answer is not None:
            rules.append(_answer(answer))
    return AnswerGrammar(grammar_spec.lark("\n".join(rules) + "\n"), syntax, tuple(unenforced))


def _free_text_with_calls(syntax: CallSyntax, *, parallel: bool) -> list[str]:
    tag = re.escape(syntax.begin).replace("/", r"\/")
    return [
        f"begin[lazy]: /(?s:.*){tag}/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/",
        f'marked: begin "\\n" body {_literal(chr(10) + syntax.end)}',
        "start: marked* TEXT?" if parallel else "start: TEXT? | marked",
    ]


def _arguments(tool: Tool, rule: str, strictness: str) -> tuple[str, list[CoverageItem]]:
    """The rule of a tool's arguments, and what of its schema it does not carry."""
    bound = strictness == "always" or (strictness == "declared" and tool.strict) or tool.strict
    if not bound:
        return _schema_rule(json.dumps({"type": "object"}), rule, "error")
    source = grammar_spec.json_schema(_object_schema(tool)).source
    try:
        return _schema_rule(source, rule, "error" if tool.strict else "validate")
    except GrammarError as error:
        error.param = f"tools.{tool.name}.parameters"
        raise


def _object_schema(tool: Tool) -> dict[str, object]:
    """Arguments are always an object; a schema that says nothing of a type means one."""
    schema = dict(tool.parameters)
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _answer(answer: GrammarSpec) -> str:
    source = answer.source if answer.kind == "json_schema" else '{"type":"object"}'
    text, _ = _schema_rule(source, "answer", answer.on_unsupported, whitespace=answer.whitespace)
    return text


def _schema_rule(
    source: str, rule: str, on_unsupported: OnUnsupported, *, whitespace: str = "single"
) -> tuple[str, list[CoverageItem]]:
    """The exact grammar of a schema, with its names put under `rule`."""
    prepared = prepare(
        source, on_unsupported=on_unsupported, whitespace="compact" if whitespace == "compact" else "single"
    )
    items = [i for i in prepared.coverage.items if i.status in ("validated", "unsupported")]
    if prepared.residual is not None:
        if on_unsupported == "error":
            raise InvalidRequest(
                "a strict schema with uniqueItems or open keys cannot be combined with tool calls; "
                "close its objects with additionalProperties: false, or drop strict"
            )
        items.append(CoverageItem("", "uniqueItems", "validated", "not followed inside a tool call"))
    return _renamed(prepared.lark, rule), items


def _renamed(lark: str, rule: str) -> str:
    """`lark` with `start` called `rule` and every other name of its own prefixed, so that several fit in one text."""
    pieces: list[str] = []
    i = 0
    while i < len(lark):
        found = _TOKEN.match(lark, i)
        assert found is not None
        text = found[0]
        if found.lastgroup == "directive" and text == "%json":
            end = i + 5 + _json_length(lark[i + 5 :])
            text = lark[i:end]
        elif found.lastgroup == "name" and not _is_attribute(lark, i):
            text = rule if text == "start" else _prefixed(text, rule)
        pieces.append(text)
        i += len(text) if found.lastgroup != "name" else len(found[0])
    return "".join(pieces).strip()


def _prefixed(name: str, rule: str) -> str:
    return f"{rule.upper()}_{name}" if name.lstrip("_")[:1].isupper() else f"{rule}_{name}"


def _is_attribute(lark: str, i: int) -> bool:
    """Inside `name[lazy, stop=...]:`, where words are llguidance's and not rules'."""
    line = lark[lark.rfind("\n", 0, i) + 1 : i]
    return line.count("[") > line.count("]") and ":" not in line


def _json_length(text: str) -> int:
    """Characters of the JSON value that `text` begins with, the white space before it included."""
    blank = len(text) - len(text.lstrip())
    _, end = json.JSONDecoder().raw_decode(text, blank)
    return end


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
