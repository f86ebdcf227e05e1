"""What the server keeps of programs that run elsewhere: the token ids of their calls, and the calls that run.

A program's calls say what is new and behind which of its earlier calls it stands. A call belongs to the session and
not to the connection: it runs on when that breaks, and its outputs wait to be asked for again. A session ends when the
client says so, or when nobody has asked for anything for EXPIRES_S; what still runs is aborted then.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from sglite.errors import InvalidRequest, Overloaded
from sglite.protocol import RequestOutput, ScoreOutput, without_prompt

EXPIRES_S = 120.0
MAX_SESSIONS = 10_000
MAX_SESSION_TOKENS = 4_000_000  # of what its calls said; the oldest are forgotten. Four bytes each
MAX_TOKENS = 64_000_000  # of all sessions; those that were not asked for longest are forgotten
MAX_CALLS = 4096  # of a session whose outputs are kept

Output = RequestOutput | ScoreOutput
Source = Callable[[], AsyncGenerator[Output, None]]


class RunningCall:
    """A call, its outputs so far, and whoever follows it. `outputs`, `error` and `over` are for reading."""

    def __init__(
        self,
        outputs: AsyncGenerator[Output, None],
        finished: Callable[[tuple[int, ...]], None],
        prompt: Callable[[], tuple[int, ...]],
    ) -> None:
        """`finished` is told what the call read and wrote. `prompt`: the ids that the client knows it by; asked for
        when the first output is there."""
        self.outputs: list[Output] = []  # without the ids of the prompt that was sent
        self.error: Exception | None = None
        self.over = False
        self._followers: list[Callable[[], None]] = []
        self._finished = finished
        self._task = asyncio.ensure_future(self._run(outputs, prompt))

    def follow(self, changed: Callable[[], None]) -> None:
        """`changed` is called whenever there is more to read."""
        self._followers.append(changed)

    def unfollow(self, changed: Callable[[], None]) -> None:
        self._followers.remove(changed)

    def cancel(self) -> None:
        self._task.cancel()
        self._end()  # the task may not have begun

    async def ended(self) -> None:
        """Waits until the engine has been told what it is told when a call is over or cancelled."""
        await asyncio.wait((self._task,))

    async def _run(self, outputs: AsyncGenerator[Output, None], prompt: Callable[[], tuple[int, ...]]) -> None:
        sent: tuple[int, ...] = ()
        used: tuple[int, ...] = ()
        written: list[int] = []
        try:
            async for output in outputs:
                if not self.outputs:
                    sent = prompt()
                if isinstance(output, RequestOutput):
                    if output.index == 0:
                        used = used or output.prompt_token_ids
                        written += output.token_ids
                    output = without_prompt(output, sent)
                    if output.finished and output.index == 0:
                        self._finished((*(used or sent), *written))
                else:
                    self._finished(sent)
                self.outputs.append(output)
                self._tell()
        except Exception as error:  # noqa: BLE001 - told to whoever follows
            self.error = error
        finally:
            await outputs.aclose()
            self._end()

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._tell()

    def _tell(self) -> None:
        for changed in self._followers:
            changed()


@dataclass(eq=False)
class ProgramSession:
    """One program. `engine_id`: as the engine knows it."""

    engine_id: str
    tokens: dict[str, array[int]] = field(default_factory=dict)  # what each call read and wrote, by request id
    calls: dict[str, RunningCall] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # requests whose rows the engine keeps
    num_tokens: int = 0
    followers: int = 0
    touched: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        """Somebody reads it, or it has a call that runs."""
        return bool(self.followers) or not all(call.over for call in self.calls.values())

    def keep(self, request_id: str, ids: tuple[int, ...]) -> int:
        """Returns how many tokens more are known."""
        change = len(ids) - len(self.tokens.pop(request_id, ()))
        self.tokens[request_id] = array("i", ids)
        self.num_tokens += change
        while self.num_tokens > MAX_SESSION_TOKENS and len(self.tokens) > 1:
            change -= self._forget(next(iter(self.tokens)))
        return change

    def forget_tokens(self) -> int:
        """Its next call has to send its whole prompt. Returns how many they were."""
        return sum(self._forget(request_id) for request_id in list(self.tokens))

    def _forget(self, request_id: str) -> int:
        size = len(self.tokens.pop(request_id))
        self.num_tokens -= size
        return size

    def prompt(self, base: str | None, keep: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The whole prompt of a call. Raises InvalidRequest for a base that is not known here (any more)."""
        if base is None:
            return ids
        known = self.tokens.get(base)
        keep = len(known) if known is not None and keep == -1 else keep
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
        self._sessions: dict[str, ProgramSession] = {}  # those that were asked for last come last
        self._num_tokens = 0
        self._sweeping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, engine_id: str, end: Callable[[ProgramSession], None]) -> ProgramSession:
        """The session of that program, a new one at its first call. `end` is called with one that expires."""
        found = self._sessions.pop(engine_id, None)
        if found is None:
            if len(self._sessions) >= MAX_SESSIONS:
                self._make_room(end)
            found = ProgramSession(engine_id)
            if not self._sweeping:
                self._sweeping = True
                self._sweep_later(end)
        self._sessions[engine_id] = found
        found.touched = time.monotonic()
        return found

    def _make_room(self, end: Callable[[ProgramSession], None]) -> None:
        """A program that comes back after its session is over sends its prompts whole. Raises Overloaded."""
        oldest = next((session for session in self._sessions.values() if not session.busy), None)
        if oldest is None:
            raise Overloaded("too many programs run on this server at once; try again later")
        self.drop(oldest.engine_id)
        end(oldest)

    def keep(self, session: ProgramSession, request_id: str, ids: tuple[int, ...]) -> None:
        """What a call of the session read and wrote."""
        if self._sessions.get(session.engine_id) is not session:
            return
        self._num_tokens += session.keep(request_id, ids)
        for other in self._sessions.values():
            if self._num_tokens <= MAX_TOKENS:
                break
            if other is not session:
                self._num_tokens -= other.forget_tokens()

    def find(self, engine_id: str) -> ProgramSession | None:
        return self._sessions.get(engine_id)

    def drop(self, engine_id: str) -> ProgramSession | None:
        """It is over: its calls are aborted."""
        session = self._sessions.pop(engine_id, None)
        if session is not None:
            self._num_tokens -= session.num_tokens
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
