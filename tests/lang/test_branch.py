"""States of one program: what a fork of forks, a join and a scope do whatever has been carried out by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import sglite as sgl
from sglite.errors import BackendError, ProgramError
from sglite.protocol import GenerateRequest, RequestOutput
from tests.fakes.client import ScriptedClient


class Waiting(ScriptedClient):
    """Answers a prompt that ends in "wait" once one that ends in "go" has been answered."""

    def __init__(self, answers: Any) -> None:
        super().__init__(answers)
        self._go = asyncio.Event()

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        prompt = self.text_of(request.prompt)
        if prompt.endswith("wait"):
            await self._go.wait()
        async for output in super().stream_request(request):
            yield output
        if prompt.endswith("go"):
            self._go.set()


def test_forks_of_forks_fail_with_their_first_state_however_many_there_are() -> None:
    def answer(prompt: str) -> str | BackendError:
        return BackendError("no answer") if prompt.endswith("wait") else "good"

    @sgl.function
    def chain(s: Any) -> Any:
        s += "wait" + sgl.gen("x")
        last = s
        for _ in range(1500):
            last = last.fork(1)[0]
        last += sgl.gen("y")
        other.run(backend=client)
        return last["y"]

    @sgl.function
    def other(s: Any) -> None:
        s += "go" + sgl.gen()

    client = Waiting(answer)
    with pytest.raises(ProgramError, match="variable 'x'.*no answer"):
        chain.run(backend=client)


def test_a_concatenated_fork_is_its_text_at_the_join() -> None:
    @sgl.function
    def program(s: Any) -> str:
        forks = s.fork(2)
        forks += lambda i: f"[{i}" + sgl.gen("a") + "]"
        s += "wait" + sgl.gen("slow")
        forks.join("concate_and_append")
        forks[0] += "go" + sgl.gen("b")
        assert forks[0]["b"]
        return s.text()

    assert program.run(backend=Waiting(lambda prompt: "..")).ret_value == "wait..[0..][1..]"


def test_whole_messages_of_concatenated_forks_are_messages_of_the_state() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("hello")
        forks = s.fork(2)
        forks += lambda i: sgl.user(f"question {i}") + sgl.assistant(sgl.gen())
        forks.join("concate_and_append")

    state = program.run(backend=ScriptedClient(answers=lambda prompt: "yes"))
    said = [(message["role"], message["content"]) for message in state.messages()]
    assert said == [
        ("user", "hello"),
        ("user", "question 0"),
        ("assistant", "yes"),
        ("user", "question 1"),
        ("assistant", "yes"),
    ]


def test_a_scope_may_stand_in_another_one_of_its_name() -> None:
    @sgl.function
    def program(s: Any) -> list[str]:
        seen: list[str] = []
        with s.var_scope("part"):
            s += "a"
            with s.var_scope("part"):
                s += "b"
            seen.append(s["part"])
            s += "c"
        return [*seen, s["part"]]

    assert program.run(backend=ScriptedClient()).ret_value == ["b", "abc"]
