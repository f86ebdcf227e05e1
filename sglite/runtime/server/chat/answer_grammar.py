"""Which constraint an answer gets when the request has tools, a response schema, or both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sglite.errors import InvalidRequest
from sglite.grammar import spec as grammar_spec
from sglite.grammar.tools import AnswerSchema, CallSyntax, ToolAnswer, ToolCall, closed
from sglite.grammar.tools import tools as tools_spec
from sglite.protocol import GrammarSpec
from sglite.runtime.server.chat.tools import TAGGED, Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    spec: GrammarSpec | None
    syntax: CallSyntax  # of the calls in this answer


def answer_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    syntax: CallSyntax,
    strictness: str,
    answer: GrammarSpec | None,
) -> AnswerGrammar:
    """Raises InvalidRequest for tools beside a constraint that is no schema."""
    if not tools or choice.mode == "none":
        return AnswerGrammar(answer, syntax)
    if answer is not None:
        if answer.kind not in ("json_schema", "json_object"):
            raise InvalidRequest(f"tools cannot be combined with a {answer.kind} constraint", param="tools")
        syntax = TAGGED  # a bare call and a bare JSON answer could be the same text
    must_call = choice.mode in ("required", "named")
    if not must_call and answer is None and strictness == "never":
        return AnswerGrammar(None, syntax)
    asked = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    spec = tools_spec(
        ToolAnswer(
            calls=tuple(_call(tool, strictness) for tool in asked),
            syntax=syntax,
            must_call=must_call,
            several=choice.parallel and choice.mode != "named",
            answer=None if answer is None else _schema_of(answer),
        )
    )
    return AnswerGrammar(spec, syntax)


def _call(tool: Tool, strictness: str) -> ToolCall:
    if tool.strict:
        return ToolCall(tool.name, _source(tool.parameters), strict=True)
    if strictness != "always":
        return ToolCall(tool.name, None)
    schema = dict(tool.parameters)
    if "type" not in schema and "$ref" not in schema:
        schema = {"type": "object", **schema}  # arguments are always an object
    return ToolCall(tool.name, _source(closed(schema)))


def _schema_of(answer: GrammarSpec) -> AnswerSchema:
    source = answer.source if answer.kind == "json_schema" else json.dumps({"type": "object"})
    return AnswerSchema(source, answer.whitespace, answer.on_unsupported)


def _source(schema: object) -> str:
    """Checked and canonical, so that equal tools share one compiled grammar."""
    return grammar_spec.json_schema(schema).source
