"""Bodies made to be expensive or to break what reads them: a quick answer of the 4xx kind, and nobody else waits."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.runtime.server.conftest import MakeClient

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"messages":' + b"[" * 1_000_000


# Bytes as they are, and what json.dumps makes of the others where a test asks for it: five seconds for all of them.
EXPENSIVE: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "messages": (CHAT, {"messages": HI * 90_000}),
    "wrong parts": (CHAT, {"messages": [{"role": "user", "content": [1] * 900_000}]}),
    "wrong ids": (TEXT, {"prompt": ["a", 1] * 350_000}),
    "wrong id lists": (TEXT, {"prompt": [[1], ["a"]] * 300_000}),
    "prompts": (TEXT, {"prompt": [[1]] * 600_000}),
    "ids": (TEXT, {"prompt": [1] * 1_300_000}),
    "native ids": ("/generate", {"input_ids": [1] * 1_300_000}),
    "rids": ("/generate", {"text": "a", "rid": [1] * 1_300_000}),
    "input items": ("/v1/responses", {"input": HI * 90_000}),
    "blocks": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 900_000}]}),
    "biases": (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(200_000)}}),
    "metadata": (CHAT, {"messages": HI, "metadata": {str(i): 1 for i in range(200_000)}}),
    "fields": (CHAT, {"messages": HI, **{f"x{i}": 1 for i in range(200_000)}}),
    "stops": (CHAT, {"messages": HI, "stop": ["a"] * 700_000}),
    "template arguments": (CHAT, {"messages": HI, "chat_template_kwargs": {f"a{i}": 1 for i in range(200_000)}}),
    "tokens": ("/detokenize", {"tokens": [5] * 1_000_000}),
    "depth": (CHAT, DEEP),
}


@pytest.mark.parametrize("name", list(EXPENSIVE))
async def test_a_large_wrong_body_is_refused_soon(serve: MakeClient, name: str) -> None:
    path, said = EXPENSIVE[name]
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    assert len(body) <= 4 << 20
    client = serve()
    begun = time.process_time()
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 5_000
    assert time.process_time() - begun < 6.0  # most take less than half a second; some took half a minute


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"\\uDFFF","messages":[{"role":"user","content":"a"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"metadata":{"\\ud800":1}}',
        b'{"messages":[{"role":"user","content":"a"}],"user":"\\udbff\\ud800"}',
    ],
)
async def test_half_a_character_is_refused_wherever_it_stands(serve: MakeClient, body: bytes) -> None:
    client = serve()
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in response.text


async def test_a_body_that_is_no_json_object_is_told_why(serve: MakeClient) -> None:
    client = serve()
    kind = {"content-type": "application/json"}
    error = (await client.post(CHAT, content=b'{"model":', headers=kind)).json()["error"]
    assert (error["message"], error["param"]) == ("the body is not JSON: Expecting value (at character 9)", None)
    for body, headers in (
        (json.dumps({"messages": HI}).encode(), {}),
        (b"[1]", kind),
    ):  # curl -d says that it sends a form
        response = await client.post(CHAT, content=body, headers=headers)
        assert response.status_code == 400
        assert (
            "a JSON object, sent with the header content-type: application/json" in response.json()["error"]["message"]
        )


@pytest.mark.parametrize("name", ["choice", "choices", "guided_choice"])
async def test_choices_go_by_each_of_their_names(serve: MakeClient, name: str) -> None:
    response = await serve().post(CHAT, json={"messages": HI, name: ["a", "b"], "regex": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "only one constraint at a time, not regex and choices"


async def test_whole_characters_from_escapes_are_taken(serve: MakeClient) -> None:
    client = serve()
    body = b'{"input":"\\ud83d\\ude00","user":"\\ud83d\\ude00","metadata":{"a":"\\ud83d\\ude00"}}'
    response = await client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert response.json()["user"] == "\U0001f600"


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt", "chat_template", "a b", ""])
async def test_a_request_cannot_put_itself_in_the_servers_place_in_a_template(serve: MakeClient, name: str) -> None:
    response = await serve().post(CHAT, json={"messages": HI, "chat_template_kwargs": {name: 1}})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "params",
    [{"stop": 5}, {"stop_token_ids": 5}, {"stop_regex": {"a": 1}}, {"stop": {"a": 1}}, {"logit_bias": [1]}, {"n": [1]}],
)
async def test_native_sampling_parameters_of_a_wrong_type_are_named(serve: MakeClient, params: dict[str, Any]) -> None:
    response = await serve().post("/generate", json={"text": "a", "sampling_params": params})
    assert response.status_code == 400


async def test_a_text_far_too_long_is_refused_by_its_beginning(serve: MakeClient) -> None:
    client = serve()
    for path, body in (
        (TEXT, {"prompt": "x" * 3_000_000}),
        ("/generate", {"text": "x" * 3_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}),
        ("/v1/responses", {"input": "x" * 3_000_000}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert "36768 of the prompt's" in response.text, response.text
    assert (await client.post(TEXT, json={"prompt": "x" * 3_000_000, "truncate_prompt": True})).status_code == 200


async def test_many_logprobs_are_put_into_shape_without_holding_up_others(serve: MakeClient) -> None:
    client = serve(lambda request, index: "x" * 500)
    body = {"messages": HI, "logprobs": True, "top_logprobs": 5}
    (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
    assert len(choice["logprobs"]["content"]) == 500
    text = await client.post(TEXT, json={"prompt": "a", "logprobs": 3, "max_tokens": 500})
    assert len(text.json()["choices"][0]["logprobs"]["tokens"]) == 500
    native = {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 500}}
    assert len((await client.post("/generate", json=native)).json()["meta_info"]["output_token_logprobs"]) == 500


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": HI, "temprature": 1}, "temprature: this server does not know the field; did you mean temp"),
        (CHAT, {"messages": HI, "zzz": 1}, "zzz: this server does not know the field; remove it"),
        (TEXT, {"prompt": "a", "max_completion_tokens": 1}, "did you mean min_tokens or max_tokens?"),
        (CHAT, {"messages": HI, "temperature" * 1000: 1}, "does not know the field; remove it"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "max_token": 1}, "did you mean max_tokens?"),
    ],
)  # fmt: skip
async def test_an_unknown_field_is_told_the_one_that_is_meant(
    serve: MakeClient, path: str, body: dict[str, Any], said: str
) -> None:
    response = await serve().post(path, json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions"),
        ("/", "there is no / here; /docs lists what there is"),
        ("/" + "a" * 5000, "/docs lists what there is"),
    ],
)
async def test_a_path_that_is_not_there_is_told_the_one_that_is_meant(serve: MakeClient, path: str, said: str) -> None:
    response = await serve().post(path, json={})
    assert response.status_code == 404
    assert said in response.json()["error"]["message"]
    assert len(response.content) < 500
