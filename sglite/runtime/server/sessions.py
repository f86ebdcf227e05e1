"""What the server keeps of programs that run elsewhere: the token ids of their calls, and the calls that run.

A program's calls say what is new and behind which of its earlier calls it stands. A call belongs to the session and
not to the connection: it runs on when that breaks, and its outputs wait to be asked for again. A session ends when the
client says so, or when nobody has asked for anything for EXPIRES_S; what still runs is aborted then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from sglite.errors import InvalidRequest, Overloaded, SgliteError
from sglite.protocol import RequestOutput, ScoreOutput

EXPIRES_S = 120.0
MAX_SESSIONS = 10_000
MAX_SESSION_TOKENS = 4_000_000  # of what its calls said; the oldest are forgotten
MAX_CALLS = 4096  # of a session whose outputs are kept

Output = RequestOutput | ScoreOutput
Source = Callable[[], AsyncGenerator[Output, None]]


class RunningCall:
    """A call, its outputs so far, and whoever follows it."""

    def __init__(
        self, outputs: AsyncGenerator[Output, None], finished: Callable[[list[Output]], None], prompt: tuple[int, ...]
    ) -> None:
        self.prompt = prompt
        self._outputs: list[Output] = []
        self._error: SgliteError | Exception | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._finished = finished
        self._task = asyncio.ensure_future(self._run(outputs))

    async def follow(self, after: int) -> AsyncGenerator[Output, None]:
        """All outputs behind the first `after`, as they come. Raises what ended the call."""
        at = after
        while True:
            while at < len(self._outputs):
                at += 1
                yield self._outputs[at - 1]
            if self._over:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._task.cancel()
        self._over = True  # the task may not have begun
        self._changed.set()

    @property
    def over(self) -> bool:
        return self._over

    async def _run(self, outputs: AsyncGenerator[Output, None]) -> None:
        try:
            async for output in outputs:
                self._outputs.append(output)
                self._changed.set()
            self._finished(self._outputs)
        except Exception as error:  # noqa: BLE001 - raised again by whoever follows
            self._error = error
        finally:
            await outputs.aclose()
            self._over = True
            self._changed.set()


@dataclass(eq=False)
class ProgramSession:
    """One program. `engine_id`: as the engine knows it."""

    engine_id: str
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what each call read and wrote, by request id
    calls: dict[str, RunningCall] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # requests whose rows the engine keeps
    followers: int = 0
    touched: float = field(default_factory=time.monotonic)

    def keep(self, request_id: str, ids: tuple[int, ...]) -> None:
        self.tokens[request_id] = ids
        total = sum(map(len, self.tokens.values()))
        while total > MAX_SESSION_TOKENS and len(self.tokens) > 1:
            total -= len(self.tokens.pop(next(iter(self.tokens))))

    def prompt(self, base: str | None, keep: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The whole prompt of a call. Raises InvalidRequest for a base that is not known here (any more)."""
        if base is None:
            return ids
        known = self.tokens.get(base)
        if known is None or not 0 <= keep <= len(known):
            raise InvalidRequest(
                f"the server does not know the first {keep} tokens of call {base!r}; send the whole prompt",
                param="base",
            )
        return (*known[:keep], *ids)

    def forget_calls(self) -> None:
        """Outputs are kept to be asked for again, those of the last calls."""
        for request_id in [r for r, call in self.calls.items() if call.over][: max(0, len(self.calls) - MAX_CALLS)]:
            del self.calls[request_id]


class ProgramSessions:
    """By tenant and program. All methods are called on the server's event loop."""

    def __init__(self, *, expires_s: float = EXPIRES_S) -> None:
        self.expires_s = expires_s
        self._sessions: dict[str, ProgramSession] = {}
        self._sweeping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, engine_id: str, end: Callable[[ProgramSession], None]) -> ProgramSession:
        """The session of that program, a new one at its first call. `end` is called with one that expires."""
        found = self._sessions.get(engine_id)
        if found is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise Overloaded("too many programs run on this server at once; try again later")
            found = self._sessions[engine_id] = ProgramSession(engine_id)
            if not self._sweeping:
                self._sweeping = True
                self._sweep_later(end)
        found.touched = time.monotonic()
        return found

    def find(self, engine_id: str) -> ProgramSession | None:
        return self._sessions.get(engine_id)

    def drop(self, engine_id: str) -> ProgramSession | None:
        """It is over: its calls are aborted."""
        session = self._sessions.pop(engine_id, None)
        if session is not None:
            for call in session.calls.values():
                call.cancel()
        return session

    def _sweep_later(self, end: Callable[[ProgramSession], None]) -> None:
        asyncio.get_running_loop().call_later(min(5.0, self.expires_s), self._sweep, end)

    def _sweep(self, end: Callable[[ProgramSession], None]) -> None:
        now = time.monotonic()
        for session in [s for s in self._sessions.values() if not s.followers and now - s.touched > self.expires_s]:
            self.drop(session.engine_id)
            end(session)
        if self._sessions:
            self._sweep_later(end)
        else:
            self._sweeping = False
