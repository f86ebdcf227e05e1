"""/v1/messages (Anthropic)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sglite.runtime.server.schemas.common import Body, Count, Entries, Loose, Number, Several


class Block(Loose):
    """A block of content: text, thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Several[Block] | None = None  # of a tool_result
    is_error: bool | None = None


class InMessage(Loose):
    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]


class AnthropicTool(Loose):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class AnthropicToolChoice(Loose):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Loose):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(Loose):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(Loose):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(Body):
    model: str | None = None
    messages: Annotated[Several[InMessage], Field(min_length=1)]
    max_tokens: Count
    system: str | Several[Block] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: Several[str] | None = None
    tools: Several[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    metadata: Entries[Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None


class CountRequest(MessagesRequest):
    """The same without an answer, so without max_tokens."""

    max_tokens: Count = 1
