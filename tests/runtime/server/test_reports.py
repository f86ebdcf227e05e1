"""What users of such servers reported (reports C, E, G and J), each with the value that is right, and where it is tested.

C  one bad constraint or parameter takes the server down
R35   a string format that nobody knows          grammar/test_reports::test_r35_a_format_that_nobody_knows
R37   a broken regex                             runtime/server/test_chat::test_what_cannot_work_is_refused_and_the_server_goes_on
R39   the late compile fails                     runtime/test_engine_grammar::test_a_failing_compile_ends_one_request
R41   a grammar without its root rule            grammar/test_reports::test_r41_a_grammar_without_a_root_rule
R43   an array in an array, 900 deep             grammar/test_reports::test_r43_deep_nesting_is_refused
R45   a union that refers to itself              grammar/test_reports::test_r45_a_union_that_refers_to_itself
R47   a token that the grammar refuses           runtime/test_engine_grammar::test_a_token_outside_the_mask_ends_one_request
R48   top_logprobs above the vocabulary          runtime/server/test_reports::test_numbers_that_would_take_all_memory_are_refused
R49   a huge n, ids outside the vocabulary       runtime/server/test_reports::test_numbers_that_would_take_all_memory_are_refused
R51   a stop id outside the vocabulary           runtime/server/test_reports::test_numbers_that_would_take_all_memory_are_refused
all   over HTTP, beside answers that go on       e2e/test_server::test_bad_requests_do_not_disturb_their_neighbours

E  mixed batches, n, penalties, logprobs
R64   a free row beside a guided one             e2e/test_constrained::test_a_free_row_beside_a_constrained_one_says_what_it_says_alone
R65   32 copies of one schema at once            grammar/test_reports::test_r65_copies_of_one_schema_do_not_touch_each_other
R67   a penalty on keys that the grammar forces  e2e/test_server::test_a_penalty_does_not_touch_the_keys_of_a_schema
R69   log-probabilities of what is masked        runtime/test_engine_grammar::test_logprobs_with_a_grammar_are_finite
R69   the same as strict JSON                    e2e/test_server::test_logprobs_beside_a_schema_are_strict_json

G  reasoning and tool calls
R84   a schema behind an open thought            runtime/server/test_reasoning::test_under_a_schema_the_thought_is_free_and_the_grammar_waits_for_its_end
R85   thinking off beside a schema               runtime/server/test_reasoning::test_with_thinking_off_a_constrained_answer_is_content
R87   the flag absent, true and false            runtime/server/test_reasoning::test_thinking_is_told_apart_from_the_answer
R89   tools beside a schema                      grammar/test_tools::test_with_an_answer_schema_it_is_either_calls_or_the_answer
R89   the same with a real model                 e2e/test_server::test_tools_beside_a_schema_give_a_call_or_the_schema
R90   required and streamed: no plain content    runtime/server/test_reports::test_a_required_call_streams_as_a_call_and_never_as_content
R91   streamed arguments join to the whole ones  e2e/test_server::test_required_tools_are_called_with_valid_arguments
R93   a call without arguments is never null     runtime/server/test_reports::test_a_call_without_arguments_streams_texts
R95   how strict tools are is the operator's     runtime/server/test_reports::test_the_operator_decides_how_strict_tools_are

J  HTTP API, abort, overload, security
R127  echo, logprobs, one id, n of 0             runtime/server/test_reports::test_the_shapes_are_openais
R129  a client that leaves frees its row         runtime/server/test_overload::test_a_client_that_leaves_frees_its_row
R131  an abort after the end, and twice          runtime/server/test_overload::test_abort_by_id_ends_the_request_and_is_idempotent
R133  a full queue answers everybody at once     runtime/server/test_overload::test_a_full_room_refuses_at_once_and_everybody_gets_a_reply
R135  no pickle across a socket                  runtime/server/test_security::test_nothing_unpickles_and_no_socket_listens_to_the_world
R137  no unpickler at all                        runtime/server/test_security::test_nothing_unpickles_and_no_socket_listens_to_the_world
R139  every route asks for a key                 runtime/server/test_security::test_every_route_but_health_needs_a_key
R141  a template of the request's own            runtime/server/test_reports::test_a_template_of_the_requests_own_is_refused
R143  a picture's address is not fetched         runtime/server/test_reports::test_no_address_of_a_request_is_visited
R145  log-probabilities of the whole vocabulary  runtime/server/test_reports::test_numbers_that_would_take_all_memory_are_refused
"""  # noqa: E501 - a table

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.conftest import MakeClient

TESTS = Path(__file__).parents[2]
ROWS = re.findall(r"^(R\d+|all) .* (\S+)::(\w+)$", __doc__ or "", re.MULTILINE)
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_every_report_has_its_test() -> None:
    assert {row[0] for row in ROWS} == {
        *(f"R{n}" for n in (35, 37, 39, 41, 43, 45, 47, 48, 49, 51)),
        *(f"R{n}" for n in (64, 65, 67, 69)),
        *(f"R{n}" for n in (84, 85, 87, 89, 90, 91, 93, 95)),
        *(f"R{n}" for n in (127, 129, 131, 133, 135, 137, 139, 141, 143, 145)),
        "all",
    }
    for _, file, name in ROWS:
        assert f"def {name}(" in (TESTS / f"{file}.py").read_text(encoding="utf-8"), f"{file} has no {name}"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1_000_000}),  # R48
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1}),
        (TEXT, {"prompt": "a", "logprobs": 1_000_000}),
        (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 1_000_000}),
        (CHAT, {"messages": HI, "n": 5_000_000}),  # R49
        (TEXT, {"prompt": "a", "n": 5_000_000}),
        (TEXT, {"prompt": "a", "best_of": 5_000_000}),
        (NATIVE, {"text": "a", "sampling_params": {"n": 5_000_000}}),
        (NATIVE, {"input_ids": [10**9]}),
        (TEXT, {"prompt": [10**9]}),
        (NATIVE, {"text": "a", "sampling_params": {"stop_token_ids": [9_999_999], "min_new_tokens": 5}}),  # R51
        (CHAT, {"messages": HI, "stop_token_ids": [9_999_999], "min_tokens": 5}),
        (NATIVE, {"text": "a" * 500, "sampling_params": {"prompt_logprobs": -1}}),  # R145
        (NATIVE, {"text": "a" * 500, "sampling_params": {"prompt_logprobs": 1_000}}),
        (NATIVE, {"text": "a" * 500, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": -1}),
        (TEXT, {"prompt": "a" * 500, "echo": True, "logprobs": -1}),
        (TEXT, {"prompt": "a" * 500, "prompt_logprobs": -1}),
    ],
)
async def test_numbers_that_would_take_all_memory_are_refused(
    serve: MakeClient, path: str, body: dict[str, Any]
) -> None:
    client = serve()
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert not client.core.requests  # type: ignore[attr-defined]
    assert (await client.post(TEXT, json={"prompt": "ab"})).status_code == 200


async def _deltas(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(CHAT, json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice["delta"] for event in events for choice in event["choices"]]


async def test_a_required_call_streams_as_a_call_and_never_as_content(serve: MakeClient) -> None:
    client = serve(lambda request, index: CALL)
    deltas = await _deltas(client, {"messages": HI, "tools": [NOW], "tool_choice": "required"})
    assert not any(delta.get("content") for delta in deltas)
    assert [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ()) if "name" in c["function"]] == [
        "now"
    ]


async def test_a_call_without_arguments_streams_texts(serve: MakeClient) -> None:
    client = serve(lambda request, index: CALL)
    deltas = await _deltas(client, {"messages": HI, "tools": [NOW]})
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert all(isinstance(piece, str) for piece in pieces)
    assert pieces[0] == ""
    assert "".join(pieces) == "{}"


@pytest.mark.parametrize(("strictness", "bound"), [("always", True), ("declared", False), ("never", False)])
async def test_the_operator_decides_how_strict_tools_are(serve: MakeClient, strictness: str, bound: bool) -> None:
    client = serve(lambda request, index: "no", tool_strictness=strictness)
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": closed}}
    await client.post(CHAT, json={"messages": HI, "tools": [tool], "tool_choice": "auto"})
    grammar = client.core.requests[0].grammar  # type: ignore[attr-defined]
    assert ("integer" in grammar.source if grammar else False) == bound


async def test_the_shapes_are_openais(serve: MakeClient) -> None:
    client = serve(lambda request, index: "xyz")
    echoed = (await client.post(TEXT, json={"prompt": "ab", "echo": True, "logprobs": 1})).json()["choices"][0]
    assert echoed["text"] == "abxyz"
    assert all(isinstance(echoed["logprobs"][name], list) for name in ("tokens", "token_logprobs", "text_offset"))
    response = await client.post(CHAT, json={"messages": HI, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert len({event["id"] for event in events}) == 1
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "a"})):
        assert (await client.post(path, json={**body, "n": 0})).status_code == 400


@pytest.mark.parametrize("field", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}])
async def test_a_template_of_the_requests_own_is_refused(serve: MakeClient, field: dict[str, Any]) -> None:
    assert (await serve().post(CHAT, json={"messages": HI, **field})).status_code == 400


async def test_no_address_of_a_request_is_visited(serve: MakeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        openai = [{"type": "image_url", "image_url": {"url": url}}]
        anthropic = [{"type": "image", "source": {"type": "url", "url": url}}]
        schema = {"$ref": f"{url}#/definitions/a"}
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": openai}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
            ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": anthropic}]}),
            (NATIVE, {"text": "a", "image_data": url}),
            ("/v1/messages", {"max_tokens": 1, "messages": HI, "mcp_servers": [{"url": url}]}),
        ):
            assert (await serve().post(path, json=body)).status_code == 400
        await serve().post(CHAT, json={"messages": HI, "json_schema": schema})
        with pytest.raises(TimeoutError):
            listener.accept()
