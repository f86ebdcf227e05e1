"""How much a server keeps of programs that run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from sglite.errors import InvalidRequest, Overloaded
from sglite.protocol import FinishReason, RequestOutput
from sglite.runtime.server import sessions as module
from sglite.runtime.server.routes import programs
from sglite.runtime.server.sessions import Output, ProgramSession, ProgramSessions, RunningCall


async def test_a_program_too_many_takes_the_place_of_the_one_that_was_not_heard_of_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    ended: list[ProgramSession] = []
    kept = ProgramSessions()
    first, second, third = (kept.session(name, ended.append) for name in ("a", "b", "c"))
    assert kept.session("a", ended.append) is first
    second.followers = 1  # somebody reads
    kept.session("d", ended.append)
    assert ended == [third]
    assert kept.find("c") is None
    first.followers = 1
    kept.session("e", ended.append).followers = 1
    with pytest.raises(Overloaded):
        kept.session("f", ended.append)


async def test_all_programs_together_keep_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    monkeypatch.setattr(module, "MAX_SESSION_TOKENS", 60)
    kept = ProgramSessions()
    old, new = (kept.session(name, lambda session: None) for name in ("old", "new"))
    kept.keep(old, "x", (1,) * 50)
    kept.keep(old, "y", (2,) * 50)
    assert list(old.tokens) == ["y"]
    kept.keep(new, "x", (3,) * 40)
    kept.keep(new, "x", (3,) * 45)
    assert old.prompt("y", 3, (9,)) == (2, 2, 2, 9)
    kept.keep(new, "z", (4,) * 10)
    assert new.prompt("z", 1, ()) == (4,)
    with pytest.raises(InvalidRequest, match="send the whole prompt"):
        old.prompt("y", 3, ())
    kept.drop("new")
    kept.keep(old, "y", (2,) * 60)
    assert old.prompt("y", 2, ()) == (2, 2)


async def test_a_call_that_is_over_keeps_its_outputs_and_not_its_prompt() -> None:
    prompt = tuple(range(1000))
    known: list[tuple[int, ...]] = []

    async def outputs() -> AsyncGenerator[Output, None]:
        yield RequestOutput(request_id="r", index=0, token_ids=(7,), prompt_token_ids=prompt[:-1])
        yield RequestOutput(request_id="r", index=0, token_ids=(8,), finish_reason=FinishReason.STOP)

    told: list[int] = []
    call = RunningCall(outputs(), known.append, lambda: prompt)
    call.follow(lambda: told.append(len(call.outputs)))
    await call.ended()
    shown = [(o.token_ids, o.prompt_token_ids) for o in call.outputs if isinstance(o, RequestOutput)]
    assert shown == [((7,), ()), ((8,), ())]
    assert call.over
    assert told == [1, 2, 2]
    assert known == [(*prompt[:-1], 7, 8)]


class Engine:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def release(self, request_id: str) -> None:
        self.told.append(f"release {request_id}")

    async def end_program(self, program_id: str) -> None:
        self.told.append(f"end {program_id}")


async def test_rows_are_released_after_the_calls_that_may_hold_them_were_aborted() -> None:
    engine = Engine()

    async def outputs() -> AsyncGenerator[Output, None]:
        try:
            await asyncio.Event().wait()
        finally:
            engine.told.append("abort")
        yield RequestOutput(request_id="r")

    kept = ProgramSessions()
    session = kept.session("p", lambda session: None)
    session.calls["r"] = RunningCall(outputs(), lambda ids: None, lambda: (1,))
    session.held.add("r")
    await asyncio.sleep(0)
    kept.drop("p")
    await programs._end(SimpleNamespace(engine=engine), session)  # type: ignore[arg-type]
    assert engine.told == ["abort", "release r", "end p"]
