"""Tools: what a request declares, how a model family writes calls, and what its prompt needs for that.

hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>    Qwen, Hermes: the template renders the tools
llama3   {"name": ..., "parameters": {...}}                              Llama 3: the template renders the tools
generic  as hermes, for a model whose template knows no tools: they are described in the system message
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglite.errors import InvalidRequest
from sglite.grammar.tools import CallSyntax
from sglite.text.types import TextTokenizer

ChoiceMode = Literal["none", "auto", "required", "named"]
FormatName = Literal["hermes", "llama3", "generic"]

TAGGED = CallSyntax("<tool_call>", "</tool_call>", "arguments", "\n")
BARE = CallSyntax("", "", "parameters", ";")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    strict: bool | None = None

    def declaration(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ChoiceMode = "auto"
    name: str = ""  # of the one tool that must be called (mode "named")
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: FormatName

    @property
    def syntax(self) -> CallSyntax:
        return BARE if self.name == "llama3" else TAGGED

    @property
    def rendered_by_template(self) -> bool:
        return self.name != "generic"

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """The messages as the template wants them; for a template without tools they and past calls become text."""
        if self.rendered_by_template:
            return [dict(message) for message in messages]
        written = [_as_text(message) for message in messages]
        if not tools:
            return written
        manual = _MANUAL.format(tools="\n".join(json.dumps(t.declaration(), ensure_ascii=False) for t in tools))
        if written and written[0]["role"] == "system":
            system = {"role": "system", "content": f"{written[0]['content']}\n\n{manual}"}
            return [system, *written[1:]]
        return [{"role": "system", "content": manual}, *written]


def detect_format(tokenizer: TextTokenizer) -> ToolFormat:
    """Which format the model's chat template teaches: seen by rendering it with a tool."""
    probe = Tool("sglite_probe", {"type": "object", "properties": {}}, "probe")
    try:
        text = tokenizer.render_chat([{"role": "user", "content": "x"}], tools=[probe.declaration()])
    except InvalidRequest:
        return ToolFormat("generic")
    if probe.name not in text:
        return ToolFormat("generic")
    if "<tool_call>" in text:
        return ToolFormat("hermes")
    if '"parameters":' in text and '{"name":' in text:
        return ToolFormat("llama3")
    return ToolFormat("generic")


def tool_format(name: str, tokenizer: TextTokenizer) -> ToolFormat:
    """Raises InvalidRequest for an unknown name."""
    if name == "auto":
        return detect_format(tokenizer)
    for known in ("hermes", "llama3", "generic"):
        if name == known:
            return ToolFormat(known)
    raise InvalidRequest(f"unknown tool format {name!r}; known: auto, hermes, llama3, generic", param="tool_format")


def check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises InvalidRequest for a choice that the tools do not allow."""
    names = [tool.name for tool in tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(f"the tool {min(twice)!r} is declared twice", param="tools")
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if choice.mode == "named" and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")


_MANUAL = """You may call functions. The functions, one JSON object a line:
{tools}

To call one, write exactly this and nothing after it:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": value}}}}
</tool_call>"""


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        text += f"{chr(10) if text else ''}<tool_call>\n{written}\n</tool_call>"
    return {"role": message["role"], "content": text}
