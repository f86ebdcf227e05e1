from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing

import pytest

from sglite.errors import GrammarError, GrammarTimeout, UnsupportedSchema
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.tools import AnswerSchema, CallSyntax, ToolAnswer, ToolCall, closed, tools
from sglite.grammar.vocab import Vocab
from tests.grammar.helpers import legal

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
    schema = '{"type":"object","properties":{"u":{"format":"idn-email"}},"additionalProperties":false}'
    strict = ToolAnswer(calls=(ADD, ToolCall("u", schema, strict=True)), syntax=TAGGED, must_call=True)
    with pytest.raises(UnsupportedSchema) as refused:
        compiler.compile_now(tools(strict))
    assert refused.value.param == "tools.u"
    loose = ToolAnswer(calls=(ToolCall("u", schema),), syntax=TAGGED, must_call=True)
    assert not compiler.compile_now(tools(loose)).coverage.exact


OPEN = ToolCall(
    "open",
    '{"type":"object","properties":{"a":{"type":"array","uniqueItems":true,"items":{"enum":[1,[2]]}},'
    '"e":{"type":"array","uniqueItems":true,"items":{"enum":[1,2,"a","b"]},"contains":{"type":"integer"}}}}',
)
IDS = ToolCall(
    "ids",
    '{"type":"object","properties":{"u":{"type":"array","items":{"type":"integer"},"uniqueItems":true},'
    '"n":{"multipleOf":999983}}}',
)


def _written(syntax: CallSyntax, call: str, arguments: str) -> str:
    text = f'{{"name": "{call}", "{syntax.key}": {arguments}}}'
    return f"{syntax.begin}\n{text}\n{syntax.end}" if syntax.begin else text


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("syntax", [TAGGED, BARE])
@pytest.mark.parametrize("before", ["", "open"])
def test_no_key_of_a_call_stands_twice_and_what_it_says_of_arrays_and_numbers_holds(must_call, syntax, before):
    ok = accepts(ToolAnswer(calls=(ADD, OPEN, IDS), syntax=syntax, must_call=must_call))
    begun = _written(syntax, "open", '{"x":"</tool_call>","y":{"x":1}}') + syntax.separator if before else ""
    for call, good, bad in (
        ("open", '{"b":1, "c":{"b":1}}', '{"b":1, "c":{"b":1}, "b":2}'),
        ("open", '{"b":[{"c":1},{"c":1}]}', '{"b":[{"c":1, "c":1}]}'),
        ("open", '{"a":[1, [2]]}', '{"a":[1, 1]}'),
        ("open", '{"e":["a", 2]}', '{"e":["a", "b"]}'),
        ("ids", '{"u":[1, 2, 11]}', '{"u":[1, 2, 1]}'),
        ("ids", '{"n":1999966}', '{"n":1999967}'),
    ):
        assert ok(begun + _written(syntax, call, good)), good
        assert not ok(begun + _written(syntax, call, bad)), bad


def test_text_that_is_no_call_may_hold_what_it_likes() -> None:
    twice = '{"name": "opens", "parameters": {"b":1,"b":1}}'
    assert accepts(ToolAnswer(calls=(OPEN,), syntax=BARE))(twice)
    assert accepts(ToolAnswer(calls=(OPEN,), syntax=TAGGED))(f"As in {twice}: {_written(TAGGED, 'open', '{}')}")


@pytest.mark.parametrize("begin", ["<tool_call>", "[CALLS]"])
def test_an_answer_beside_calls_keeps_its_keys_apart_too(begin):
    syntax = CallSyntax(begin, "</end>", "arguments", "\n")
    anything = AnswerSchema('{"type":["object","array","number"],"uniqueItems":true}')
    ok = accepts(ToolAnswer(calls=(OPEN,), syntax=syntax, answer=anything))
    for good in ('{"a":1,"b":{"a":1}}', "[]", '["[CALLS]"]', "[1,2]", "12", _written(syntax, "open", '{"b":1}')):
        assert ok(good), good
    for bad in ('{"a":1,"a":2}', "[1,2,1]", _written(syntax, "open", '{"b":1, "b":1}')):
        assert not ok(bad), bad


SPANNING = [
    '"b":', '"b"', 'b":1', ', "b":1', '{"b":1, "b":1}', ': {"b":1, "b":', '{"b":1, "c":', "1, 1", "[1, 1]", "1]}", "}}",
    '"open", "arguments": ', '"arguments": {"', "call>\n", "\n</tool",
]  # fmt: skip


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_mask_of_a_call_says_what_accept_says(must_call, seed):
    texts = [*(bytes([i]) for i in range(256)), *(text.encode() for text in SPANNING)]
    vocab = Vocab((*texts, b""), (*([b""] * len(texts)), b"<|end|>"), (len(texts),), lambda text: list(text.encode()))
    with closing(GrammarCompiler(vocab, CompilerConfig(isolate=False))) as spanning:
        grammar = spanning.compile_now(tools(ToolAnswer(calls=(OPEN, IDS), syntax=TAGGED, must_call=must_call)))
        matcher, rng = grammar.matcher(), random.Random(seed)
        script = list(b'<tool_call>\n{"name": "open", "arguments": {') if seed % 2 else []
        for step in range(70):
            allowed = set(legal(matcher, vocab.size))
            forced = matcher.forced()
            for token_id in range(vocab.size):
                taken = matcher.accept([token_id])
                matcher.rollback(taken)
                if token_id in allowed:
                    assert taken == 1, vocab.tokens[token_id]
                elif not forced and b"," not in vocab.tokens[token_id][1:]:
                    assert taken == 0, vocab.tokens[token_id]
            if matcher.finished:
                break
            fond = [i for i in allowed if set(vocab.tokens[i]) <= set(b'ab"{}[],:1 ')]
            token_id = script[step] if step < len(script) else rng.choice(fond or sorted(allowed))
            assert matcher.accept([token_id]) == 1


def test_a_tool_is_planned_where_a_dear_schema_hurts_nobody():
    dear = json.dumps({"anyOf": [{"const": f"some text {n}"} for n in range(3_000)]})
    with closing(GrammarCompiler(Vocab.of_bytes(), CompilerConfig(quick_seconds=0.005, cpu_seconds=0.005))) as compiler:
        with pytest.raises(GrammarTimeout):
            compiler.compile_now(tools(ToolAnswer(calls=(ToolCall("t", dear),), syntax=TAGGED, must_call=True)))
    with closing(GrammarCompiler(Vocab.of_bytes(), CompilerConfig())) as compiler:
        wrong = ToolCall("t", '{"format":"idn-email"}', strict=True)
        with pytest.raises(UnsupportedSchema) as refused:
            compiler.compile_now(tools(ToolAnswer(calls=(wrong,), syntax=TAGGED, must_call=True)))
        assert refused.value.param == "tools.t"
        loose = compiler.compile_now(tools(ToolAnswer(calls=(ToolCall("t", wrong.schema),), syntax=TAGGED)))
        assert not loose.coverage.exact


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
