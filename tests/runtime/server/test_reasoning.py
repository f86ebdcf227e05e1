"""Thinking comes first and free, a constraint holds for the answer only, and the prompt says which is which."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.fakes.tokenizer import ByteTokenizer
from tests.runtime.server.conftest import MakeClient

OPEN, CLOSE = 259, 260
URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


class ThinkTokenizer(ByteTokenizer):
    """Bytes, and the two tags as one id each. The template is like Qwen3's: thinking is on unless it is switched off,
    and off is a closed, empty thought in the prompt. `opens`: like DeepSeek's, it opens the thought itself."""

    vocab_size = 261

    def __init__(self, *, opens: bool = False) -> None:
        self.opens = opens

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(</?think>)", text):
            ids += {"<think>": [OPEN], "</think>": [CLOSE]}.get(piece, list(piece.encode()))
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {OPEN: b"<think>", CLOSE: b"</think>"}.get(token_id, bytes([token_id]) if token_id < 256 else b"")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        text = super().render_chat(messages)
        if template_args.get("enable_thinking") is False:
            return f"{text}<think>\n\n</think>\n\n"
        return f"{text}<think>\n" if self.opens else text


def prompt_of(client: Any) -> str:
    return ThinkTokenizer().decode(client.core.requests[-1].prompt)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("enable", [None, True])
async def test_thinking_is_told_apart_from_the_answer(serve: MakeClient, opens: bool, enable: bool | None) -> None:
    thought = "let me see\n</think>\n\n42"
    client = serve(
        lambda request, index: thought if opens else f"<think>\n{thought}", tokenizer=ThinkTokenizer(opens=opens)
    )
    body = {"messages": HELLO} if enable is None else {"messages": HELLO, "enable_thinking": enable}
    answer = (await client.post(URL, json=body)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me see", "42")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    "body",
    [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
async def test_with_thinking_off_a_constrained_answer_is_content(serve: MakeClient, body: dict[str, Any]) -> None:
    client = serve(lambda request, index: '{"a":1}', tokenizer=ThinkTokenizer())
    answer = (await client.post(URL, json={"messages": HELLO, "response_format": FORMAT, **body})).json()
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1}
    assert "reasoning_content" not in message
    assert client.core.requests[-1].grammar_after == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize("opens", [False, True])
async def test_under_a_schema_the_thought_is_free_and_the_grammar_waits_for_its_end(
    serve: MakeClient, opens: bool
) -> None:
    client = serve(lambda request, index: 'hm\n</think>\n\n{"a":1}', tokenizer=ThinkTokenizer(opens=opens))
    body = {"messages": HELLO, "response_format": FORMAT, "thinking_budget": 50}
    message = (await client.post(URL, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a":1}')
    request = client.core.requests[-1]  # type: ignore[attr-defined]
    assert request.grammar_after == (CLOSE,)
    assert request.think_budget == 50
    assert prompt_of(client).endswith("<think>\n"), "the thought must have begun, or the grammar would never"


async def test_a_budget_that_ends_inside_the_thought_gives_no_content(serve: MakeClient) -> None:
    client = serve(lambda request, index: "a long thought that does not end", tokenizer=ThinkTokenizer(opens=True))
    body = {"messages": HELLO, "max_tokens": 8, "response_format": FORMAT}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "a long t"


async def test_thinking_streams_as_its_own_deltas_and_calls_come_after_it(serve: MakeClient) -> None:
    call = 'use the tool</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    client = serve(lambda request, index: call, tokenizer=ThinkTokenizer(opens=True))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "stream": True}
    async with client.stream("POST", URL, json=body) as response:
        lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "use the tool"
    assert "".join(d.get("content") or "" for d in deltas) == ""
    pieces = [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ())]
    assert pieces[0] == ""
    assert "".join(pieces) == "{}"


async def test_reasoning_can_be_left_in_the_text(serve: MakeClient) -> None:
    client = serve(lambda request, index: "<think>a</think>b", tokenizer=ThinkTokenizer())
    whole = (await client.post(URL, json={"messages": HELLO, "separate_reasoning": False})).json()
    assert whole["choices"][0]["message"]["content"] == "<think>a</think>b"
    anthropic = {"messages": HELLO, "max_tokens": 100}
    blocks = (await client.post("/v1/messages", json=anthropic)).json()["content"]
    assert [(b["type"], b.get("thinking") or b.get("text")) for b in blocks] == [("thinking", "a"), ("text", "b")]
    items = (await client.post("/v1/responses", json={"input": "hi"})).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
