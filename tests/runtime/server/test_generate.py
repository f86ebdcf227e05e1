"""/generate with the requests that SGLang's frontend sends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglite.protocol import GenerateRequest
from tests.runtime.server.conftest import MakeClient


def hello(request: GenerateRequest, index: int) -> str:
    return "hello €"


async def test_one_text_gives_one_answer_and_a_list_a_list(serve: MakeClient) -> None:
    client = serve()
    params = {
        "max_new_tokens": 16,
        "temperature": 0,
        "spaces_between_special_tokens": True,
        "skip_special_tokens": True,
    }
    one = (await client.post("/generate", json={"text": "abc", "sampling_params": params})).json()
    assert one["text"] == "abc"
    assert one["output_ids"] == [97, 98, 99]
    assert one["meta_info"]["finish_reason"]["type"] == "stop"
    assert one["meta_info"]["prompt_tokens"] == 3
    several = (await client.post("/generate", json={"text": ["a", "b"]})).json()
    assert [answer["text"] for answer in several] == ["a", "b"]
    assert (await client.post("/generate", json={"input_ids": [104, 105]})).json()["text"] == "hi"
    assert len((await client.post("/generate", json={"text": "a", "sampling_params": {"n": 2}})).json()) == 2


async def test_a_streams_text_is_everything_so_far(serve: MakeClient) -> None:
    client = serve(hello)
    async with client.stream("POST", "/generate", json={"text": "a", "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data:"))["text"] for line in lines[:-1]]
    assert texts == ["hello €"[: i + 1] for i in range(7)]


async def test_logprobs_have_sglangs_shape(serve: MakeClient) -> None:
    client = serve(hello)
    body = {"text": "ab", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = (await client.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 2}})).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 104, "h"], [-0.5, 101, "e"]]
    assert len(meta["output_top_logprobs"][0]) == 2
    assert meta["finish_reason"] == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": "a", "sampling_params": {"temprature": 1}},
        {"text": "a", "sampling_params": {"n": 5_000_000}},
        {"text": "a", "sampling_params": {"stop": ["x"] * 100}},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "sampling_params": {"prompt_logprobs": 90}},
        {"text": "a", "sampling_params": {"prompt_logprobs": -1}},
        {"text": "a" * 50_000, "sampling_params": {"prompt_logprobs": 5}},
        {"text": "a", "sampling_params": {"regex": "[a"}},
        {"text": "a", "sampling_params": {"seed": 10**40}},
        {"text": "a", "sampling_params": [{}, {}]},
        {"text": [], "sampling_params": {}},
        {"text": ["a"] * 1000},
        {"input_ids": [10**9]},
        {"input_ids": [999]},
        {"text": "a", "logprob_start_len": -5, "return_logprob": True},
        {"text": "a", "top_logprobs_num": 1_000_000, "return_logprob": True},
        {"text": "a", "image_data": "http://127.0.0.1/x.png"},
        {"text": "a", "rid": "bad id"},
    ],
)
async def test_what_cannot_work_is_refused(serve: MakeClient, body: dict[str, Any]) -> None:
    client = serve()
    response = await client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert (await client.post("/generate", json={"text": "a"})).status_code == 200


async def test_tokens_go_both_ways(serve: MakeClient) -> None:
    client = serve()
    ids = (await client.post("/tokenize", json={"prompt": "hé"})).json()
    assert ids["tokens"] == list("hé".encode())
    assert (await client.post("/detokenize", json={"tokens": ids["tokens"]})).json()["text"] == "hé"
    assert (await client.post("/detokenize", json={"tokens": [10**6]})).status_code == 400
    headers = {"content-type": "application/json"}
    lone = await client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers)
    assert lone.status_code == 400
    info = (await client.get("/get_model_info")).json()
    assert info["model_path"] == "scripted"


async def test_the_end_of_prompts_is_scored_over_their_shared_beginning(serve: MakeClient) -> None:
    client = serve()
    body = {
        "text": ["ab yes", "ab no"],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": 3,
    }
    answers = (await client.post("/generate", json=body)).json()
    assert [e[2] for e in answers[0]["meta_info"]["input_token_logprobs"]] == ["y", "e", "s"]
    assert answers[1]["meta_info"]["input_token_logprobs"][0] == [-110.0, 110, "n"]
    assert answers[1]["meta_info"]["output_token_logprobs"] == []
    (request,) = client.core.requests  # type: ignore[attr-defined]
    assert request.prompt == tuple(b"ab ")
    assert len(request.continuations) == 2


async def test_calls_of_one_program_keep_its_arrival_and_tenant(serve: MakeClient) -> None:
    client = serve()
    for remaining in (2, 1):
        program = {"program_id": "p1", "remaining": remaining, "wanted_again": -1}
        response = await client.post("/generate", json={"input_ids": [97], "program": program, "heal": True})
        assert response.status_code == 200
    first, second = client.core.requests  # type: ignore[attr-defined]
    assert first.program.program_id == "anonymous:p1"
    assert first.program.arrival == second.program.arrival > 0
    assert (first.program.remaining, second.program.remaining) == (2, 1)
    assert first.heal


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_prompt_is_truncated_where_the_body_says_so(serve: MakeClient, path: str, body: dict[str, Any]) -> None:
    client = serve()
    for more in ({}, {"truncate_prompt": True}):
        assert (await client.post(path, json=body | more)).status_code == 200
    assert [r.truncate_prompt for r in client.core.requests] == [False, True]  # type: ignore[attr-defined]
    if path == "/generate":
        await client.post(path, json=body | {"sampling_params": {"truncate_prompt": True}})
        assert client.core.requests[-1].truncate_prompt  # type: ignore[attr-defined]
