"""The stock clients, unchanged, against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import anthropic
import instructor
import openai
import pydantic
import pydantic_ai
import pytest
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from sglite.protocol import GenerateRequest
from tests.runtime.server.conftest import Live

HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}


class Person(pydantic.BaseModel):
    name: str
    age: int


def answers(request: GenerateRequest, index: int) -> str:
    """Depends on what is asked for: a constraint, tools in the prompt, or nothing."""
    prompt = bytes(request.prompt).decode()  # type: ignore[arg-type]
    if request.grammar is not None and request.grammar.kind == "json_schema":
        return '{"name":"Ada","age":36}'
    if "<tool_call>" in prompt and "<tool_response>" not in prompt:
        return CALL
    return "hello there"


@pytest.fixture
def server(live: Callable[..., Live]) -> Live:
    return live(answers)


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "hello there"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 11
    assert answer.choices[0].logprobs.content[0].token == "h"
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_openai_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert chunks[-1].usage.completion_tokens == 11


def test_openai_parse_gives_the_pydantic_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="m", messages=HELLO, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


def test_openai_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    messages = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message.content
    with client.chat.completions.stream(model="m", messages=HELLO, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    assert final.choices[0].finish_reason == "tool_calls"


async def test_openai_async(server: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].message.content == "hello there"
        stream = await client.completions.create(model="m", prompt="abc", stream=True, max_tokens=5)
        assert "".join([c.choices[0].text async for c in stream]) == "hello"


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["a", "b"], n=2, logprobs=1, echo=True, max_tokens=5)
    assert [c.text for c in answer.choices] == ["ahello", "ahello", "bhello", "bhello"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens[0] == "a"
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]


def test_openai_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input="hi", instructions="be brief")
    assert answer.output_text == "hello there"
    assert answer.status == "completed"
    parsed = client.responses.parse(model="m", input="hi", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    cut = client.responses.create(model="m", input="hi", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_openai_responses_stream_and_call_tools(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "hello there"
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
    answer = client.responses.create(model="m", input="hi", tools=[tool])
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"a": 1, "b": 2}
    history = [
        {"role": "user", "content": "hi"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    assert client.responses.create(model="m", input=history, tools=[tool]).output_text == "hello there"


def test_openai_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most"):
        client.chat.completions.create(model="m", messages=HELLO, n=5000)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=HELLO, n=5000, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.InternalServerError, match="embeddings"):
        client.embeddings.create(model="m", input="x")


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="m", max_tokens=64, messages=HELLO, system="be brief")
    assert answer.content[0].text == "hello there"
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 11
    with claude.messages.stream(model="m", max_tokens=64, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "hello there"
    assert claude.messages.create(model="m", max_tokens=3, messages=HELLO).stop_reason == "max_tokens"
    assert claude.messages.count_tokens(model="m", messages=HELLO).input_tokens > 5


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    answer = claude.messages.create(model="m", max_tokens=200, messages=HELLO, tools=tools)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input == {"a": 1, "b": 2}
    assert answer.stop_reason == "tool_use"
    with claude.messages.stream(model="m", max_tokens=200, messages=HELLO, tools=tools) as stream:
        assert stream.get_final_message().content[-1].input == {"a": 1, "b": 2}
    history = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]},
    ]
    assert claude.messages.create(model="m", max_tokens=64, messages=history, tools=tools).content[0].text
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
        claude.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": [image]}])


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai_talks_calls_tools_and_gives_objects(server: Live, kind: type) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = kind("m", provider=OpenAIProvider(openai_client=client))
        assert (await pydantic_ai.Agent(model).run("hi")).output == "hello there"
        typed = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person))
        assert (await typed.run("hi")).output == Person(name="Ada", age=36)
        added: list[tuple[int, int]] = []
        agent = pydantic_ai.Agent(model)

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            added.append((a, b))
            return a + b

        assert (await agent.run("hi")).output == "hello there"
        assert added == [(1, 2)]
        async with pydantic_ai.Agent(model).run_stream("hi") as stream:
            assert await stream.get_output() == "hello there"


def test_instructor_gives_the_object(client: openai.OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    found = patched.chat.completions.create(model="m", messages=HELLO, response_model=Person)
    assert found.model_dump() == {"name": "Ada", "age": 36}  # instructor makes a subclass
