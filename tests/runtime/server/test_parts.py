from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.grammar.tools import CallSyntax
from sglite.runtime.server.chat.parts import (
    Part,
    PlainParser,
    Reasoning,
    ReasoningSplitter,
    Text,
    ToolArguments,
    ToolParser,
    ToolStart,
)

HERMES = CallSyntax("<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA = CallSyntax("", "", "parameters", ";")
NAMES = frozenset({"add", "now"})


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring pieces of the same kind put together."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolArguments) and isinstance(last, ToolArguments) and part.index == last.index:
            out[-1] = ToolArguments(part.index, last.text + part.text)
        else:
            out.append(part)
    return out


def parse(parser: ToolParser | ReasoningSplitter, pieces: list[str]) -> list[Part]:
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.close())


CASES = [
    (HERMES, "just text ", [Text("just text ")]),
    (HERMES, "a < b <tool", [Text("a < b <tool")]),
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "}</tool_call>\\""}}\n</tool_call>',
        [Text("Sure."), ToolStart(0, "add"), ToolArguments(0, '{"a": 1, "s": "}</tool_call>\\""}')],
    ),
    (
        HERMES,
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n<tool_call>{"name":"add","arguments":{"a":[{}]}}</tool_call>',
        [ToolStart(0, "now"), ToolArguments(0, "{}"), ToolStart(1, "add"), ToolArguments(1, '{"a":[{}]}')],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call> done',
        [ToolStart(0, "add"), ToolArguments(0, '{"a":1}'), Text(" done")],
    ),
    (HERMES, "<tool_call>nonsense</tool_call>", [Text("<tool_call>nonsense</tool_call>")]),
    (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [Text('<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
    ),
    (HERMES, '<tool_call>{"name": "add", "argum', [Text('<tool_call>{"name": "add", "argum')]),
    (HERMES, '<tool_call>{"name":"add","arguments":{"a":', [ToolStart(0, "add"), ToolArguments(0, '{"a":')]),
    (
        LLAMA,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        [ToolStart(0, "add"), ToolArguments(0, '{"a": 1}'), ToolStart(1, "now"), ToolArguments(1, "{}")],
    ),
    (LLAMA, '{"answer": 1}', [Text('{"answer": 1}')]),
    (LLAMA, "hello {", [Text("hello {")]),
]


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_is_cut(
    syntax: CallSyntax, text: str, expected: list[Part], size: int
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(ToolParser(syntax, NAMES), pieces) == expected


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (True, "\nhm </thin k </think>\n\n42\n", [Reasoning("hm </thin k"), Text("42\n")]),
        (True, "cut off ", [Reasoning("cut off")]),
        (False, "<think>\na\n</think>\nb", [Reasoning("a"), Text("b")]),
        (False, "no thinking </think>", [Text("no thinking </think>")]),
        (False, "<th", [Text("<th")]),
        (True, "</think>{}", [Text("{}")]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_thinking_is_split_from_the_answer(inside: bool, text: str, expected: list[Part], size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(ReasoningSplitter(PlainParser(), inside=inside), pieces) == expected


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name":"add","arguments":', "{}", "}", " ", "x", "\n", '"'])
    ),
    st.integers(1, 7),
    st.sampled_from([HERMES, LLAMA]),
)
def test_the_pieces_of_a_stream_join_to_the_whole_answer(words: list[str], size: int, syntax: CallSyntax) -> None:
    text = "".join(words)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(ToolParser(syntax, NAMES), pieces) == parse(ToolParser(syntax, NAMES), [text] if text else [])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        '{"parameters": {"a": "no"}, "name": "add"}',
        '{"name": "\\u0061dd", "parameters": {"a": "no"}}',
        '{"name": "adder", "parameters": {}}',
        '\u00a0{"name": "add", "parameters": {}}',
        '{"name": "add", "parameters": 3}',
    ],
)
def test_under_a_grammar_only_its_own_calls_are_calls(text: str, size: int) -> None:
    parser = ToolParser(LLAMA, NAMES, exact=True)
    assert parse(parser, [text[i : i + size] for i in range(0, len(text), size)]) == [Text(text)]


def test_a_type_before_the_name_is_part_of_a_call() -> None:
    text = '{"type": "function", "name": "add", "parameters": {"a": 1}}'
    assert parse(ToolParser(LLAMA, NAMES, exact=True), list(text)) == [
        ToolStart(0, "add"),
        ToolArguments(0, '{"a": 1}'),
    ]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = ToolParser(HERMES, NAMES)
    parts = parser.feed('<tool_call>{"name":"add","arguments":{"a": 12')
    assert parts == [ToolStart(0, "add"), ToolArguments(0, '{"a": 12')]
    assert json.loads(
        '{"a": 12' + "".join(p.text for p in parser.feed("}}</tool_call>") if isinstance(p, ToolArguments))
    )
