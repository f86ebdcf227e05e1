"""/v1/responses beyond what the stock client's tests see, and what all APIs tell of a schema that no mask carries."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import MakeClient
from tests.runtime.server.test_reasoning import ThinkTokenizer

_KEYS = "abcdefghijklmnopqr"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


async def test_the_events_of_a_stream_come_in_order_and_agree_with_the_end(serve: MakeClient) -> None:
    client = serve(lambda request, index: "hello")
    found = await events(client, "/v1/responses", {"input": "hi"})
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[2]["item"]["content"] == []
    assert found[3]["part"]["text"] == ""
    (item,) = found[-1]["response"]["output"]
    assert item == found[-2]["item"]
    assert item["content"][0]["text"] == "hello"


async def test_a_cut_answer_is_incomplete_and_so_is_its_item(serve: MakeClient) -> None:
    client = serve(lambda request, index: "hello")
    found = await events(client, "/v1/responses", {"input": "hi", "max_output_tokens": 2})
    last = found[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_thinking_is_an_item_of_its_own_with_its_events(serve: MakeClient) -> None:
    client = serve(lambda request, index: "<think>deep</think>ok", tokenizer=ThinkTokenizer())
    found = await events(client, "/v1/responses", {"input": "hi"})
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    parts = [event["part"]["type"] for event in found if event["type"] == "response.content_part.added"]
    assert parts == ["reasoning_text", "output_text"]
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
async def test_logprobs_belong_to_the_text(serve: MakeClient, asked: dict[str, Any]) -> None:
    client = serve(lambda request, index: "abc")
    whole = (await client.post("/v1/responses", json={"input": "hi", **asked})).json()
    (content,) = whole["output"][0]["content"]
    assert [entry["token"] for entry in content["logprobs"]] == ["a", "b", "c"]
    assert len(content["logprobs"][0]["top_logprobs"]) == asked.get("top_logprobs", 0)
    found = await events(client, "/v1/responses", {"input": "hi", **asked})
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == ["a", "b", "c"]


async def test_sampling_fields_reach_the_engine(serve: MakeClient) -> None:
    client = serve(lambda request, index: "abc")
    own = {"stop": ["x"], "min_tokens": 2, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}, "stop_token_ids": [7]}
    assert (await client.post("/v1/responses", json={"input": "hi", **own})).status_code == 200
    params = client.core.requests[0].sampling_params  # type: ignore[attr-defined]
    assert (params.stop, params.min_tokens, params.frequency_penalty) == (("x",), 2, 0.5)
    assert (params.logit_bias, params.stop_token_ids) == ({5: 1.0}, (7,))


async def test_a_long_conversation_loses_its_oldest_exchanges(serve: MakeClient) -> None:
    client = serve(lambda request, index: "ok")
    talk = [
        {"role": role, "content": f"{role} {i} " + "word " * 100} for i in range(12) for role in ("user", "assistant")
    ]
    body = {"instructions": "be brief", "input": [*talk, {"role": "user", "content": "last"}], "max_output_tokens": 50}
    assert (await client.post("/v1/responses", json={**body, "truncation": "auto"})).status_code == 200
    prompt = bytes(client.core.requests[0].prompt).decode()  # type: ignore[attr-defined]
    assert prompt.startswith("<system>be brief</system>\n<user>user ")
    assert prompt.endswith("<user>last</user>\n<assistant>")
    assert "<user>user 0 " not in prompt
    assert 4096 - 50 - 1200 < len(prompt) <= 4096 - 50, "as much as fits is kept"
    short = {"input": "short", "truncation": "auto"}
    assert (await client.post("/v1/responses", json=short)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "n": 2}),
        ("/v1/responses", {"input": "a", "truncation": "some"}),
        ("/v1/responses", {"input": "a", "include": ["everything"]}),
        ("/v1/responses", {"input": "a", "metadata": {str(i): "x" for i in range(17)}}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5000}),
        ("/v1/completions", {"prompt": "a", "metadata": {str(i): "x" for i in range(17)}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "metadata": dict.fromkeys(_KEYS)}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}],
                          "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ],
)  # fmt: skip
async def test_what_does_not_act_is_refused(serve: MakeClient, path: str, body: dict[str, Any]) -> None:
    assert (await serve().post(path, json=body)).status_code == 400


_ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/completions": {"prompt": "a", "json_schema": SCHEMA, "on_unsupported": "validate"},
    "/v1/responses": {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/generate": {"text": "a", "sampling_params": {"json_schema": SCHEMA}, "on_unsupported": "validate"},
}


@pytest.mark.parametrize("path", list(_ASKS))
async def test_what_no_mask_carried_is_named_in_every_api_streamed_or_not(serve: MakeClient, path: str) -> None:
    client = serve(lambda request, index: "{}")
    whole = (await client.post(path, json=_ASKS[path])).json()
    told = whole["meta_info"]["unenforced"] if path == "/generate" else whole["unenforced"]
    assert told == [{"pointer": "/not", "keyword": "not", "status": "validated", "reason": ""}]
    stream = json.dumps(await events(client, path, _ASKS[path]))
    assert stream.count('"pointer": "/not"') == 1
