"""`sglite serve` as a process, the real small model behind it, stock clients in front."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import anthropic
import httpx
import instructor
import jsonschema
import openai
import psutil
import pydantic
import pydantic_ai
import pytest
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.model

SUM = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": SUM, "strict": True},
}
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=130)


class Server:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from sglite.cli import main; main()", "serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"http://[0-9.:]+", line)
            if found:
                self.url = found[0]
                break
        else:
            raise AssertionError("the server did not start")
        # Read on, so that a full pipe never stops the server.
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        (found,) = [p for p in self.children() if "sglite.runtime.async_engine.child" in p.cmdline()]
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--engine", "process", "--max-rows", "32")
    yield made
    children = made.children()
    assert made.stop() == 0
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def test_a_pydantic_class_is_filled(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Ada is 36 years old."}]
    answer = client.chat.completions.parse(model="m", messages=messages, response_format=Person, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.usage.completion_tokens_details.forced_tokens > 0


def test_streamed_and_whole_greedy_answers_are_the_same(client: openai.OpenAI) -> None:
    body = {"model": "m", "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    again = client.chat.completions.create(**body)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_required_tools_are_called_with_valid_arguments(client: openai.OpenAI) -> None:
    body = {
        "model": "m",
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**body, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SUM)
    pieces = [
        delta.function.arguments
        for chunk in client.chat.completions.create(**body, parallel_tool_calls=False, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(pieces) == call.function.arguments


def test_tools_beside_a_schema_give_a_call_or_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="m", messages=ASK, tools=[TOOL], response_format=Person, temperature=0, max_tokens=200
    )
    message = answer.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Person)


@pytest.mark.parametrize(
    ("field", "value", "pattern"), [("regex", "[0-9]{3}-x", "[0-9]{3}-x"), ("choice", ["yes", "no"], "yes|no")]
)
def test_own_constraints_go_as_extra_body(client: openai.OpenAI, field: str, value: object, pattern: str) -> None:
    answer = client.chat.completions.create(model="m", messages=ASK, extra_body={field: value})
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120) as client:
        yield client


def test_anthropic(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "add", "input_schema": SUM}]
    answer = claude.messages.create(
        model="m", max_tokens=200, messages=ASK, tools=tools, tool_choice={"type": "tool", "name": "add"}
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    jsonschema.validate(call.input, SUM)


def test_anthropic_streams_what_it_says_whole(claude: anthropic.Anthropic) -> None:
    greedy = {"temperature": 0}  # this client has no argument for it any more
    body = {"model": "m", "max_tokens": 24, "messages": ASK, "system": "Be brief.", "extra_body": greedy}
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    tools = [{"name": "add", "input_schema": SUM}]
    with claude.messages.stream(**{**body, "max_tokens": 200}, tools=tools, tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    for block in final.content:
        jsonschema.validate(block.input, SUM)


async def test_openai_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        body = {"model": "m", "messages": ASK, "temperature": 0, "max_tokens": 24}
        whole, parsed = await asyncio.gather(
            client.chat.completions.create(**body),
            client.chat.completions.parse(**{**body, "max_tokens": 100}, response_format=Person),
        )
        stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert isinstance(parsed.choices[0].message.parsed, Person)


def test_openai_runs_a_tool_and_streams_the_call(client: openai.OpenAI) -> None:
    body = {"model": "m", "tools": [TOOL], "temperature": 0, "max_tokens": 200}
    choice = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(**body, messages=ASK, tool_choice=choice) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert final.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SUM)
    messages = [*ASK, final.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    answer = client.chat.completions.create(**body, messages=messages, tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_openai_responses(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="m", input="Ada is 36 years old.", text_format=Person, temperature=0)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(model="m", input="Say hi.", max_output_tokens=8, temperature=0) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert final.output_text == text
    assert events[-1].type == ("response.incomplete" if final.usage.output_tokens == 8 else "response.completed")
    tool = {"type": "function", "name": "add", "parameters": SUM, "strict": True}
    answer = client.responses.create(model="m", input="2 + 3?", tools=[tool], tool_choice="required", temperature=0)
    jsonschema.validate(json.loads(answer.output[0].arguments), SUM)


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(server: Server, kind: type) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        model = kind("m", provider=OpenAIProvider(openai_client=client))
        settings = {"temperature": 0.0, "max_tokens": 200}
        for output in (pydantic_ai.NativeOutput(Person), pydantic_ai.ToolOutput(Person)):
            agent = pydantic_ai.Agent(model, output_type=output, model_settings=settings)
            assert isinstance((await agent.run("Ada is 36 years old.")).output, Person)


def test_instructor(client: openai.OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": "Ada is 36 years old."}]
    found = patched.chat.completions.create(model="m", messages=messages, response_model=Person, temperature=0)
    assert 0 <= found.age <= 130


def test_a_program_runs_over_the_wire(server: Server) -> None:
    import sglite as sgl

    @sgl.function
    def program(s):
        s += "The capital of France is"
        s += sgl.gen("city", max_tokens=4, temperature=0)
        s += " Is that right? "
        s += sgl.select("verdict", ["yes", "no"])

    state = program.run(backend=sgl.RuntimeEndpoint(server.url))
    assert "Paris" in state["city"]
    assert state["verdict"] in ("yes", "no")


def test_a_penalty_does_not_touch_the_keys_of_a_schema(client: openai.OpenAI) -> None:
    item = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}
    schema = {"type": "array", "items": {**item, "additionalProperties": False}, "minItems": 6, "maxItems": 6}
    answer = client.chat.completions.create(
        model="m",
        messages=ASK,
        frequency_penalty=2,
        presence_penalty=2,
        temperature=0,
        extra_body={"json_schema": schema},
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_logprobs_beside_a_schema_are_strict_json(server: Server) -> None:
    body = {"messages": ASK, "json_schema": SUM, "logprobs": True, "top_logprobs": 5, "max_tokens": 40}
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).text

    def not_json(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    entries = json.loads(text, parse_constant=not_json)["choices"][0]["logprobs"]["content"]
    assert entries
    assert all(-9999 <= top["logprob"] <= 0 for entry in entries for top in entry["top_logprobs"])


async def test_bad_requests_do_not_disturb_their_neighbours(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:

        async def good(number: int) -> str:
            answer = await client.completions.create(
                model="m", prompt=f"Count: {number}, {number + 1},", max_tokens=12, temperature=0
            )
            return answer.choices[0].text

        async def bad(body: dict[str, object]) -> int:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.completions.create(model="m", prompt="x", extra_body=body)
            return refused.value.status_code

        alone = [await good(n) for n in range(6)]
        hostile = [
            {"regex": "[a"},
            {"regex": "(?=a)b"},
            {"ebnf": 'rout ::= "x"'},
            {"json_schema": {"type": "array", "items": {"$ref": "#/x"}}},
            {"json_schema": _nested(900)},
            {"prompt": [10**9]},
            {"stop_token_ids": [9999999], "min_tokens": 5},
            {"n": 5_000_000},
            {"logprobs": 1_000_000},
            {"prompt": "long " * 20_000},
        ]
        together = await asyncio.gather(*(good(n) for n in range(6)), *(bad(body) for body in hostile))
        assert together[:6] == alone
        assert all(400 <= code < 500 or code == 503 for code in together[6:])  # type: ignore[operator]


def test_a_killed_engine_is_told_at_once_and_comes_back(server: Server) -> None:
    result: dict[str, float] = {}

    def ask() -> None:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        result["status"], result["at"] = response.status_code, time.monotonic()

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.5)
    killed = time.monotonic()
    engine = server.engine()
    workers = engine.children(recursive=True)
    engine.kill()
    asking.join(30)
    assert result["status"] == 503
    assert result["at"] - killed < 2
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 503
    assert httpx.get(f"{server.url}/health/ready", timeout=30).status_code == 503
    _, left = psutil.wait_procs(workers, timeout=10)
    assert not left, "its grammar workers end with it"
    end = time.monotonic() + 120
    while httpx.get(f"{server.url}/health", timeout=30).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_a_termination_lets_running_answers_finish_and_nobody_new_in() -> None:
    server = Server("--engine", "process")
    children = server.children()
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=10).raise_for_status()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert sum('"text"' in line for line in rest) > 20
    assert server.process.wait(30) == 0
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left
    server.process.stderr.close()  # type: ignore[union-attr]


def test_two_interrupts_end_it_now() -> None:
    server = Server("--engine", "process")
    engine = server.engine()
    asking = threading.Thread(
        target=lambda: _try(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 4000, "ignore_eos": True})
    )
    asking.start()
    time.sleep(1)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None, "the running request may finish"
    begun = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(5) == 130
    assert time.monotonic() - begun < 2
    asking.join(10)
    psutil.wait_procs([engine], timeout=5)
    assert not engine.is_running()
    server.process.stderr.close()  # type: ignore[union-attr]


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _try(url: str, body: dict[str, object]) -> None:
    try:
        httpx.post(url, json=body, timeout=60)
    except httpx.HTTPError:
        return
