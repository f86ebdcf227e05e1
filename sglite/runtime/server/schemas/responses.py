"""/v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sglite.runtime.server.schemas.common import ConstraintFields, Count, IgnoredFields, Loose, SamplingFields, Several


class InputItem(Loose):
    """A message, a past function call, or a function's result."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Several[dict[str, Any]] | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Several[dict[str, Any]] | None = None
    summary: Several[dict[str, Any]] | None = None


class TextFormat(Loose):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Loose):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(Loose):
    type: str
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Loose):
    type: str
    name: str | None = None


class ReasoningOptions(Loose):
    effort: str | None = None
    summary: str | None = None


Include = Literal[
    "message.output_text.logprobs",
    # What follows is about tools that are refused here and things that are not kept: it changes nothing.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(SamplingFields, ConstraintFields, IgnoredFields):
    model: str | None = None
    input: str | Several[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Count | None = None
    text: TextOptions | None = None
    tools: Several[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Count | None = None

    previous_response_id: str | None = None  # refused: nothing is stored
    conversation: Any = None
    background: bool | None = None
    include: Several[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
