"""The parts of an answer, found while it streams.

    text pieces -> ReasoningSplitter -> (thinking | answer) -> a tool parser -> Text, ToolStart, ToolArguments

A piece may end anywhere. What could still turn out to be a tag or a call's head is held back until it is certain;
everything else is passed on at once. Joined parts do not depend on how the text was cut into pieces, so the streamed
answer and the whole one agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

import regex

from sglite.grammar.tools import CallSyntax

THINK_BEGIN = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    index: int
    text: str  # a piece of the arguments' JSON text


Part = Text | Reasoning | ToolStart | ToolArguments


class AnswerParser(Protocol):
    def feed(self, text: str) -> list[Part]: ...

    def close(self) -> list[Part]:
        """What was held back, once nothing more comes."""
        ...


class PlainParser:
    """No tools: all of it is text."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def close(self) -> list[Part]:
        return []


class ReasoningSplitter:
    """Thinking up to `</think>`, then the answer, which another parser takes.

    `inside`: the prompt ended with an open thinking tag. Otherwise thinking begins only where the text begins with
    `<think>`. White space beside the tags belongs to neither section.
    """

    def __init__(self, answer: AnswerParser, *, inside: bool) -> None:
        self._answer = answer
        self._step = self._thinking if inside else self._undecided
        self._held = ""
        self._started = False  # some thinking has been passed on

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        step = None
        while self._held and step != self._step:
            step = self._step
            parts += step()
        return parts

    def close(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._step == self._thinking:
            held = held.rstrip() if self._started else held.strip()
            return [Reasoning(held)] if held else []
        return [*(self._answer.feed(held) if held else []), *self._answer.close()]

    def _undecided(self) -> list[Part]:
        text = self._held.lstrip()
        if text.startswith(THINK_BEGIN):
            self._held = text[len(THINK_BEGIN) :]
            self._step = self._thinking
        elif not THINK_BEGIN.startswith(text):
            self._step = self._answering
        return []

    def _thinking(self) -> list[Part]:
        thought, tag, rest = self._held.partition(THINK_END)
        if tag:
            self._step = self._between
        else:
            thought, rest = _certain(self._held, THINK_END)
        thought = thought.rstrip()
        if not self._started:
            thought = thought.lstrip()
        self._held = rest
        self._started = self._started or bool(thought)
        return [Reasoning(thought)] if thought else []

    def _between(self) -> list[Part]:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answering
        return []

    def _answering(self) -> list[Part]:
        held, self._held = self._held, ""
        return self._answer.feed(held)


class JsonValueScanner:
    """Finds where a JSON object or array ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The index after the value's last character, or None while it goes on."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


_HEAD = (
    r'[ \t\r\n]*\{[ \t\r\n]*(?:"type"[ \t\r\n]*:[ \t\r\n]*"function"[ \t\r\n]*,[ \t\r\n]*)?'
    r'"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*,[ \t\r\n]*"KEY"[ \t\r\n]*:[ \t\r\n]*(?=\{)'
)


class ToolParser:
    """Calls of one syntax out of an answer; the rest is text.

    The name comes first in every call that the server's grammars allow, so its arguments can stream. A free call in
    another order is passed on once it is complete; what turns out to be no call stays text.

    `exact`: a grammar made the answer, so that whatever is spelled otherwise than its calls is text.
    """

    def __init__(self, syntax: CallSyntax, names: frozenset[str], *, exact: bool = False) -> None:
        self._syntax = syntax
        self._names = names
        self._exact = exact
        self._head = regex.compile(_HEAD.replace("KEY", syntax.key))
        self._tail = regex.compile(r"\s*\}\s*" + regex.escape(syntax.end))
        self._step = self._in_text if syntax.begin else self._in_head
        self._held = ""
        self._open = ""  # the begin tag of the call being read, in case it is none
        self._count = 0
        self._scanner = JsonValueScanner()

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        step = None
        while self._held and step != self._step:
            step = self._step
            parts += step()
        return parts

    def close(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._step in (self._in_head, self._in_whole) and (self._open or held.strip()):
            return self._whole_call(held) or [Text(self._open + held)]
        if self._step == self._in_text and held and (held.strip() or not self._count):
            return [Text(held)]
        return []

    def _in_text(self) -> list[Part]:
        begin = self._syntax.begin
        if not begin:
            text, self._held = self._held, ""
            return [Text(text)]
        text, tag, rest = self._held.partition(begin)
        if tag:
            self._begin_call(tag)
            text = text.rstrip()
        else:
            text, rest = _certain(self._held, begin)
        self._held = rest
        return [Text(text)] if text else []

    def _in_head(self) -> list[Part]:
        found = self._head.match(self._held, partial=True)
        if found is not None and found.partial:
            return []
        name = "" if found is None else found[1][1:-1] if self._exact else _string(found[1])
        if found is None or name not in self._names:
            return self._not_a_streamed_call()
        self._held = self._held[found.end() :]
        self._scanner = JsonValueScanner()
        self._step = self._in_arguments
        self._count += 1
        return [ToolStart(self._count - 1, name)]

    def _in_arguments(self) -> list[Part]:
        end = self._scanner.feed(self._held)
        piece = self._held if end is None else self._held[:end]
        self._held = self._held[len(piece) :]
        if end is not None:
            self._step = self._in_tail
        return [ToolArguments(self._count - 1, piece)]

    def _in_tail(self) -> list[Part]:
        found = self._tail.match(self._held, partial=True)
        if found is None and self._syntax.end and self._syntax.end not in self._held:
            return []  # more keys after the arguments: they are skipped up to the end tag
        if found is not None and found.partial:
            return []
        end = found.end() if found is not None else self._held.find(self._syntax.end) + len(self._syntax.end)
        self._held = self._held[end:]
        self._step = self._in_text if self._syntax.begin else self._in_separator
        return []

    def _in_separator(self) -> list[Part]:
        text = self._held.lstrip()
        if text.startswith(self._syntax.separator):
            self._held = text[len(self._syntax.separator) :]
            self._begin_call("")
        elif text:
            self._step = self._in_text
        return []

    def _in_whole(self) -> list[Part]:
        text, tag, rest = self._held.partition(self._syntax.end)
        if not tag:
            return []
        parts = self._whole_call(text) or [Text(self._open + text + tag)]
        self._held = rest
        self._step = self._in_text
        return parts

    def _begin_call(self, tag: str) -> None:
        self._open = tag
        self._step = self._in_head

    def _not_a_streamed_call(self) -> list[Part]:
        self._step = self._in_whole if self._syntax.end else self._in_text
        return []

    def _whole_call(self, text: str) -> list[Part]:
        """The call that `text` is, in any key order; [] where it is none."""
        if self._exact:
            return []
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return []
        self._count += 1
        written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return [ToolStart(self._count - 1, call["name"]), ToolArguments(self._count - 1, written)]


def _string(literal: str) -> str:
    try:
        return json.loads(literal)
    except ValueError:  # a wrong escape
        return literal


def _certain(text: str, tag: str) -> tuple[str, str]:
    """Cut before what may be the beginning of `tag`, and before the white space in front of it."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            break
    else:
        size = 0
    kept = text[: len(text) - size].rstrip()
    return kept, text[len(kept) :]
