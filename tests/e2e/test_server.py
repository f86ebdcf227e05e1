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
import pytest

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
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


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


def test_anthropic(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120)
    tools = [{"name": "add", "input_schema": SUM}]
    answer = client.messages.create(
        model="m", max_tokens=200, messages=ASK, tools=tools, tool_choice={"type": "tool", "name": "add"}
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    jsonschema.validate(call.input, SUM)


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
    server.engine().kill()
    asking.join(30)
    assert result["status"] == 503
    assert result["at"] - killed < 2
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 503
    end = time.monotonic() + 120
    while httpx.get(f"{server.url}/health", timeout=30).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.5)


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
