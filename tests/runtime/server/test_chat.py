from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import MakeClient

HELLO = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], url: str = URL) -> list[dict[str, Any]]:
    async with client.stream("POST", url, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_conversation_is_completed(serve: MakeClient) -> None:
    client = serve(lambda request, index: "hello €")
    answer = (await client.post(URL, json={"messages": HELLO, "model": "any"})).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello €", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 9


async def test_a_stream_keeps_one_id_and_joins_to_the_whole(serve: MakeClient) -> None:
    client = serve(lambda request, index: f"answer {index} €")
    chunks = await streamed(client, {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in choices) == f"answer {index} €"
        assert [c["finish_reason"] for c in choices][-1] == "stop"


async def test_streamed_tool_calls_join_to_the_whole_ones(serve: MakeClient) -> None:
    client = serve(lambda request, index: CALL)
    body = {"messages": HELLO, "tools": [ADD]}
    whole = (await client.post(URL, json=body)).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see."
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    deltas = [c["choices"][0]["delta"] for c in await streamed(client, body)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "add", "arguments": ""}
    assert calls[0]["id"].startswith("call_")
    assert all("id" not in call for call in calls[1:])
    assert len(calls) > 3
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."


async def test_the_prompt_describes_tools_to_a_model_whose_template_has_none(serve: MakeClient) -> None:
    client = serve(lambda request, index: CALL)
    history = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "three"},
    ]
    await client.post(URL, json={"messages": history, "tools": [ADD]})
    prompt = bytes(client.core.requests[-1].prompt).decode()  # type: ignore[attr-defined]
    assert '"name": "add"' in prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>' in prompt
    assert "<tool_response>\nthree\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ("none", None),
        ("auto", "tools"),
        ("required", "tools"),
        ({"type": "function", "function": {"name": "add"}}, "tools"),
    ],
)
async def test_the_tool_choice_decides_the_grammar(serve: MakeClient, choice: Any, grammar: str | None) -> None:
    client = serve(lambda request, index: CALL)
    await client.post(URL, json={"messages": HELLO, "tools": [ADD], "tool_choice": choice})
    spec = client.core.requests[-1].grammar  # type: ignore[attr-defined]
    assert (spec.kind if spec else None) == grammar


async def test_response_formats_become_grammars(serve: MakeClient) -> None:
    client = serve(lambda request, index: "{}")
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}

    async def spec(**body: Any) -> Any:
        response = await client.post(URL, json={"messages": HELLO, **body})
        assert response.status_code == 200, response.text
        return client.core.requests[-1].grammar  # type: ignore[attr-defined]

    assert await spec(response_format={"type": "text"}) is None
    assert (await spec(response_format={"type": "json_object"})).kind == "json_object"
    strict = await spec(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    )
    assert (strict.kind, strict.on_unsupported) == ("json_schema", "error")
    assert strict.source.index('"z"') < strict.source.index('"a"')
    loose = await spec(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert loose.on_unsupported == "validate"
    assert (await spec(regex="a+")).kind == "regex"
    assert (await spec(guided_choice=["a", "b"])).kind == "choice"
    assert (await spec(structured_outputs={"regex": "b"})).source == "b"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"top_logprobs": 1_000_000, "logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop_token_ids": [9_999_999], "min_tokens": 5}, "stop_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 10**30}, "seed"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template"),
        ({"functions": []}, "functions"),
        ({"temprature": 1}, "temprature"),
        ({"regex": "a", "choice": ["b"]}, None),
        ({"regex": "[a"}, "regex"),
        ({"regex": "a" * 300_000}, "regex"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": []}, "messages"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
async def test_what_cannot_work_is_refused_and_the_server_goes_on(
    serve: MakeClient, body: dict[str, Any], param: str | None
) -> None:
    client = serve()
    for stream in (False, True):
        response = await client.post(URL, json={"messages": HELLO, "stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert param in (error["param"] or "")
    assert (await client.post(URL, json={"messages": HELLO})).status_code == 200


async def test_logprobs_are_finite_json(serve: MakeClient) -> None:
    client = serve(lambda request, index: "ab")
    choice = (await client.post(URL, json={"messages": HELLO, "logprobs": True, "top_logprobs": 2})).json()["choices"][
        0
    ]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert entries[0]["bytes"] == [97]
    assert len(entries[0]["top_logprobs"]) == 2
    chunks = await streamed(client, {"messages": HELLO, "logprobs": True})
    found = [e for c in chunks for choice in c["choices"] for e in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in found] == ["a", "b"]


async def test_a_length_stop_says_so(serve: MakeClient) -> None:
    client = serve(lambda request, index: "abcdef")
    answer = (await client.post(URL, json={"messages": HELLO, "max_completion_tokens": 2})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_of_a_model_without_tags_are_bound_too(serve: MakeClient, choice: str) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    client = serve(lambda request, index: call, tool_format="llama3")
    body = {"messages": HELLO, "tools": [ADD], "tool_choice": choice}
    choices = (await client.post(URL, json=body)).json()["choices"]
    assert choices[0]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert client.core.requests[0].grammar.kind == "tools"  # type: ignore[attr-defined]
    loose = serve(lambda request, index: call, tool_format="llama3", tool_strictness="never")
    await loose.post(URL, json=body)
    assert (loose.core.requests[0].grammar is None) == (choice == "auto")  # type: ignore[attr-defined]
