"""The conversation loop, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglite.cli.chat import converse
from sglite.errors import PromptTooLong
from sglite.protocol import RequestOutput


def talk(lines: list[Any], answer: Any, system: str | None = None) -> tuple[list[dict[str, str]], str]:
    given = iter(lines)
    shown: list[str] = []

    def ask() -> str:
        line = next(given, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return converse(answer, ask=ask, show=shown.append, system=system), "".join(shown)


def echo(messages: list[dict[str, str]]) -> Iterator[RequestOutput]:
    for text in (f"{len(messages)}:", messages[-1]["content"]):
        yield RequestOutput(request_id="r", text=text)


def test_every_turn_sees_the_ones_before() -> None:
    messages, shown = talk(["hi", "", "again"], echo, system="S")
    assert [m["content"] for m in messages] == ["S", "hi", "2:hi", "again", "4:again"]
    assert shown == "2:hi\n4:again\n\n"


def test_reset_begins_again_with_the_system_message() -> None:
    messages, _ = talk(["hi", "/reset", "new", "/system T", "/nonsense", "last", "/exit", "never"], echo, system="S")
    assert [m["content"] for m in messages] == ["T", "last", "2:last"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_written() -> None:
    def stopped(messages: list[dict[str, str]]) -> Iterator[RequestOutput]:
        yield RequestOutput(request_id="r", text="half")
        raise KeyboardInterrupt

    messages, shown = talk(["hi", KeyboardInterrupt()], stopped)
    assert messages[-1] == {"role": "assistant", "content": "half"}
    assert "[stopped]" in shown


def test_a_refused_question_is_taken_back() -> None:
    def refuse(messages: list[dict[str, str]]) -> Iterator[RequestOutput]:
        raise PromptTooLong("the prompt is too long")
        yield

    messages, shown = talk(["hi"], refuse)
    assert messages == []
    assert "too long" in shown
