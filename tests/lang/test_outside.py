"""The state of a streamed program, for who started it; and the end of what a cancelled run had begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import sglite as sgl
from sglite.errors import BackendError, ProgramError, RequestAborted
from sglite.lang.branch import Branch
from sglite.lang.bridge import program_loop
from sglite.lang.interpreter import carry_out
from sglite.lang.items import Item
from sglite.lang.nodes import Gen, GenParams
from sglite.lang.roles import roles_without_tokenizer
from sglite.lang.session import Session
from sglite.protocol import GenerateRequest, RequestOutput
from tests.fakes.client import ScriptedClient


@sgl.function
def fails_when_idle(s: Any) -> None:
    s += "x" + sgl.gen("a")
    s["a"]
    raise OSError("disk")


@pytest.mark.parametrize(
    "ask",
    [
        lambda state: state.sync(),
        lambda state: state.text(),
        lambda state: state.messages(),
        lambda state: state["never"],
        lambda state: state.get_meta_info("never"),
    ],
)
def test_a_streamed_program_that_failed_with_an_idle_state_says_so(ask: Callable[[Any], Any]) -> None:
    state = fails_when_idle.run(backend=ScriptedClient(["yes"]), stream=True)
    with pytest.raises(ProgramError, match="disk"):
        ask(state)


def test_a_variable_that_was_bound_before_the_failure_can_be_read() -> None:
    state = fails_when_idle.run(backend=ScriptedClient(["yes"]), stream=True)
    with pytest.raises(ProgramError):
        state.sync()
    assert state["a"] == "yes"


def _session(client: ScriptedClient) -> Session:
    return Session(
        name="p",
        client=client,
        loop=program_loop().loop,
        posts=program_loop().posts,
        defaults=GenParams(),
        roles=roles_without_tokenizer(client),
        segments=None,
    )


async def _nothing() -> None:
    await asyncio.sleep(0.02)


def test_a_call_appended_while_the_session_is_being_cancelled_does_not_run() -> None:
    client = ScriptedClient(delay_s=5)
    session = _session(client)
    branch = Branch(session, carry_out)
    session.cancel("gone")  # between _enqueue's look at the flag and the state's becoming busy
    assert branch._try_enqueue([Item(Gen(name="a"), 0, {})])
    program_loop().run(_nothing())
    assert client.running == 0
    assert branch.failed is not None


def test_a_fork_seeded_after_the_cancelling_does_not_run() -> None:
    client = ScriptedClient(delay_s=5)
    session = _session(client)
    parent = Branch(session, carry_out)
    child = Branch(session, carry_out, parent=parent)
    child.append(Gen(name="a"))
    session.cancel("gone")

    async def seed() -> None:
        child.seed(parent, siblings=1)
        await asyncio.sleep(0.02)

    program_loop().run(seed())
    assert client.running == 0
    assert child.failed is not None


class OneFails(ScriptedClient):
    """The prompt that ends in "bad" fails after all others are answered."""

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if self.text_of(request.prompt).endswith("bad"):
            await asyncio.sleep(0.02)
            raise BackendError("no answer")
        async for output in super().stream_request(request):
            yield output


@pytest.mark.parametrize("ask", [lambda s: s.sync(), lambda s: list(s.text_iter()), lambda s: s.error()])
def test_whoever_waits_for_a_stream_hears_of_a_fork_that_fails_last(ask: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "good" + sgl.gen("a")
        s.fork(1)[0].__iadd__("bad" + sgl.gen("b"))

    state = program.run(backend=OneFails(), stream=True)
    try:
        found = ask(state)
    except ProgramError as error:
        found = error
    assert isinstance(found, ProgramError)
    assert "variable 'b'" in str(found)


def test_a_stream_that_is_cancelled_while_only_its_forks_are_busy_has_failed() -> None:
    asked = threading.Event()

    class Hangs(ScriptedClient):
        async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
            asked.set()
            await asyncio.Event().wait()
            async for output in super().stream_request(request):
                yield output

    @sgl.function
    def program(s: Any) -> None:
        s += "good"
        s.fork(1)[0].__iadd__("bad" + sgl.gen("b"))

    state = program.run(backend=Hangs(), stream=True)
    assert asked.wait(5)
    state["unknown"] = 1  # the function has ended
    state.cancel()
    error = state.error()
    assert error is not None
    assert isinstance(error.__cause__, RequestAborted)
