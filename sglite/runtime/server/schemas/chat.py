"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sglite.runtime.server.schemas.common import (
    ConstraintFields,
    Count,
    Entries,
    FunctionSpec,
    IgnoredFields,
    Loose,
    SamplingFields,
    Several,
    StreamOptions,
)


class ContentPart(Loose):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Loose):
    name: str
    arguments: str = ""


class PastToolCall(Loose):
    id: str = ""
    type: str = "function"
    function: CalledFunction


class Message(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[ContentPart] | None = None
    name: str | None = None
    tool_calls: Several[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ToolSpec(Loose):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Loose):
    name: str


class NamedTool(Loose):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Loose):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Loose):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag


class ChatRequest(SamplingFields, ConstraintFields, IgnoredFields):
    model: str | None = None
    messages: Annotated[Several[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Several[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Several[str] | None = None
    verbosity: str | None = None

    enable_thinking: bool | None = None
    thinking_budget: Count | None = None
    separate_reasoning: bool = True
    chat_template_kwargs: Entries[Any] | None = None
    chat_template: str | None = None  # known so that it can be refused with its reason
    continue_final_message: bool = False
    functions: Several[Any] | None = None
    function_call: Any = None
