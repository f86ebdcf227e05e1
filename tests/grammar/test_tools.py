from __future__ import annotations

from collections.abc import Callable

import pytest

from sglite.errors import GrammarError, UnsupportedSchema
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.tools import AnswerSchema, CallSyntax, ToolAnswer, ToolCall, closed, tools
from sglite.grammar.vocab import Vocab

TAGGED = CallSyntax("<tool_call>", "</tool_call>", "arguments", "\n")
BARE = CallSyntax("", "", "parameters", ";")
ADD = ToolCall(
    "add", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
)
SAY = ToolCall(
    "say",
    '{"type":"object","properties":{"t":{"enum":["a/b","]"]},"a":{"type":"string","pattern":"^x+$"}},"required":["t"],"additionalProperties":false}',
)
ANSWER = AnswerSchema(
    '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'
)
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "say", "arguments": {"t":"a/b", "a":"xx"}}\n</tool_call>'

compiler = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(isolate=False))
Accepts = Callable[[str], bool]


def accepts(answer: ToolAnswer) -> Accepts:
    grammar = compiler.compile_now(tools(answer))

    def whole(text: str) -> bool:
        matcher = grammar.matcher()
        data = list(text.encode())
        return matcher.accept(data) == len(data) and matcher.can_stop

    return whole


def test_required_calls_are_nothing_but_calls() -> None:
    ok = accepts(ToolAnswer(calls=(ADD, SAY), syntax=TAGGED, must_call=True))
    assert ok(ONE)
    assert ok(TWO)
    assert ok(f"{ONE}\n{TWO}")
    for bad in ("", "text", ONE[:-1], ONE + " text", "x" + ONE, ONE.replace("12", '"12"'), ONE.replace("add", "sub")):
        assert not ok(bad), bad
    assert not ok(ONE.replace('{"a": 12}', '{"t": "]"}'))


def test_a_single_call_is_all_where_only_one_is_allowed() -> None:
    ok = accepts(ToolAnswer(calls=(ADD,), syntax=TAGGED, must_call=True, several=False))
    assert ok(ONE)
    assert not ok(f"{ONE}\n{ONE}")


def test_free_text_may_hold_calls_and_a_begun_call_obeys_its_schema() -> None:
    ok = accepts(ToolAnswer(calls=(ADD, SAY), syntax=TAGGED))
    for good in ("", "text", "a < b <tool_cal", f"Let me see.\n{ONE}", f"{ONE}\n{TWO} done", f"{ONE}{TWO}"):
        assert ok(good), good
    for bad in ("text <tool_call>", f"x {ONE[:-3]}", ONE.replace("12", "1.5"), "<tool_call>\n{}"):
        assert not ok(bad), bad
    ok = accepts(ToolAnswer(calls=(ADD,), syntax=TAGGED, several=False))
    assert ok(f"so {ONE}")
    assert not ok(f"{ONE}\n{ONE}")
    assert not ok(f"{ONE} more")


def test_with_an_answer_schema_it_is_either_calls_or_the_answer() -> None:
    ok = accepts(ToolAnswer(calls=(ADD,), syntax=TAGGED, answer=ANSWER))
    assert ok(ONE)
    assert ok('{"a":true}')
    for bad in ("", "text", '{"a":1}', '{"a":true}' + ONE, f"so {ONE}"):
        assert not ok(bad), bad


def test_an_answer_schema_that_cannot_work_is_refused_also_where_a_call_is_required() -> None:
    bad = ToolAnswer(calls=(ADD,), syntax=TAGGED, must_call=True, answer=AnswerSchema('{"type":"nothing"}'))
    with pytest.raises(GrammarError):
        compiler.compile_now(tools(bad))
    good = accepts(ToolAnswer(calls=(ADD,), syntax=TAGGED, must_call=True, answer=ANSWER))
    assert good(ONE)
    assert not good('{"a":true}')


def test_bare_calls() -> None:
    ok = accepts(ToolAnswer(calls=(ADD,), syntax=BARE, must_call=True))
    assert ok('{"name": "add", "parameters": {"a":1}}')
    assert ok('{"name": "add", "parameters": {"a":1}};{"name": "add", "parameters": {"a":2}}')
    with pytest.raises(GrammarError, match="begin tag"):
        tools(ToolAnswer(calls=(ADD,), syntax=BARE, answer=ANSWER))


def test_a_bare_answer_that_begins_as_a_call_is_one_and_everything_else_is_text() -> None:
    ok = accepts(ToolAnswer(calls=(ADD, SAY), syntax=BARE))
    call = '{"name": "add", "parameters": {"a":1}}'
    typed = '{"type": "function", "name": "say", "parameters": {"t":"]"}}'
    for good in (
        call,
        typed,
        f"{call}; {typed}",
        '\n{ "name" : "add", "parameters" : {"a": 1} }',
        "",
        "hello {",
        '{"answer": 1}',
        '{"name": "Ada", "age": 36}',
        '{"name": "adder", "parameters": {}}',
        '{"type": "object", "name": "add"}',
        f"I would write {call}",
        f"```\n{call}\n```",
    ):
        assert ok(good), good
    for bad in (
        call.replace("1", '"1"'),
        call + " and more",
        '{"name": "add"}',
        '{"name":"add","parameters":{"a":1},"x":2}',
        ' { "name":\n"say", "parameters": {"t":"c"}}',
        typed.replace("]", "["),
        f"{call}; no",
    ):
        assert not ok(bad), bad
    ok = accepts(ToolAnswer(calls=(ADD,), syntax=BARE, several=False))
    assert ok(call)
    assert not ok(f"{call};{call}")


def test_what_a_strict_tool_says_and_no_mask_carries_is_refused_with_its_place() -> None:
    numbers = '{"type":"array","items":{"type":"integer"},"uniqueItems":true}'
    schema = f'{{"type":"object","properties":{{"u":{numbers}}},"additionalProperties":false}}'
    strict = ToolAnswer(calls=(ADD, ToolCall("u", schema, strict=True)), syntax=TAGGED, must_call=True)
    with pytest.raises(UnsupportedSchema) as refused:
        compiler.compile_now(tools(strict))
    assert refused.value.param == "tools.u"
    loose = ToolAnswer(calls=(ToolCall("u", schema),), syntax=TAGGED, must_call=True)
    assert not compiler.compile_now(tools(loose)).coverage.exact


def test_a_tool_without_a_schema_takes_any_object() -> None:
    ok = accepts(ToolAnswer(calls=(ToolCall("f", None),), syntax=TAGGED, must_call=True))
    assert ok('<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": null}]}}\n</tool_call>')
    assert not ok('<tool_call>\n{"name": "f", "arguments": []}\n</tool_call>')


def test_objects_that_say_nothing_of_other_keys_are_closed() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "o": {"type": "object"}}}
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["a"]["items"]["additionalProperties"] is False
    assert "additionalProperties" not in made["properties"]["o"]
    assert closed({"properties": {}, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in closed({"properties": {}, "anyOf": [{"required": ["x"]}]})
