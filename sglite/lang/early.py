"""Calls that are sent before the one that they go on from has ended.

While a generation runs, its program has often said already what comes behind it: text and another call, or forks that
begin so. Those prompts are known but for the answer's tokens, which the engine has. So they are sent at once, as the
text behind the answer of a request that has not ended, and begin in the step after its end: no way through the
program's threads lies between the two.

    program    gen a ................. a's answer . b's answer is on its way already
    engine     [a a a a a a a a a a a][b b b b b b

The prompt that was sent is held against the one that the state comes to. Where they differ (a stop text cut the answer,
the text merged with it), the early call is given up and made as always. So the text is the same, early or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from sglite.errors import SgliteError
from sglite.lang.branch import Branch
from sglite.lang.client import takes_followers
from sglite.lang.items import Fork, Snapshot
from sglite.lang.lower import Following, following_generation, following_score, resolved
from sglite.lang.nodes import Gen, GenParams, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from sglite.lang.session import Session
from sglite.lang.transcript import Prompt, TokenTranscript
from sglite.protocol import GenerateRequest, RequestOutput, ScoreOutput, ScoreRequest

AFTER_S = 0.004  # by then the program's code has appended what it appends without reading

Options = tuple[tuple[int, ...], ...]
Request = GenerateRequest | ScoreRequest
Answer = Coroutine[Any, Any, "list[RequestOutput] | ScoreOutput"]


class Early:
    """One call that is on its way. `prompt`: what comes behind the leader's tokens; `options` of a select."""

    def __init__(self, request: Request, prompt: Prompt, options: Options, answer: Answer) -> None:
        self.request = request
        self._prompt = prompt
        self._options = options
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(_outcome(answer))

    def is_for(self, leader: tuple[int, ...], prompt: Prompt, options: Options = ()) -> bool:
        """It is the call with this prompt, behind these tokens of its leader."""
        tail = cast("tuple[int, ...]", self._prompt.content)
        return (
            bool(leader)
            and prompt.content == (*leader, *tail)
            and prompt.heal == self._prompt.heal
            and options == self._options
        )

    def give_up(self) -> None:
        """Aborts it, unless it is over."""
        self._task.cancel()

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """Of a generation."""
        for output in await self._result():
            yield output

    async def scored(self) -> ScoreOutput:
        return await self._result()

    async def _result(self) -> Any:
        result = await self._task
        if isinstance(result, Exception):
            raise result
        return result


async def _outcome(answer: Answer) -> Any:
    """The answer, or the error that it ended with: nobody may ever ask."""
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
        return error


async def _collected(client: Any, request: GenerateRequest) -> list[RequestOutput]:
    async with aclosing(client.stream_request(request)) as outputs:
        return [output async for output in outputs]


def may_lead(session: Session, params: GenParams) -> bool:
    """The followers of such a generation may be sent while it runs. A stream shows each piece as it comes, so it waits
    for each call."""
    return (
        session.segments is not None
        and not session.stream
        and (params.n or 1) == 1
        and params.max_tokens != 0
        and takes_followers(session.client)
    )


def send_soon(branch: Branch, leader: GenerateRequest) -> asyncio.TimerHandle | None:
    """To be cancelled when the leader's answer is there."""
    return asyncio.get_running_loop().call_later(AFTER_S, _send, branch, leader) if leader.hold else None


def _send(branch: Branch, leader: GenerateRequest) -> None:
    assert branch.session.segments is not None
    transcript = TokenTranscript.behind(branch.session.segments)
    roles = tuple(message["role"] for message in branch.chat)
    with contextlib.suppress(SgliteError):  # what cannot be asked is refused when its turn comes
        _Walk(leader, transcript, roles, branch.role).send(branch, branch.siblings)


@dataclass(slots=True)
class _Walk:
    """Carries out on paper what a state will do behind its leader, up to its next call."""

    leader: GenerateRequest
    transcript: TokenTranscript
    roles: tuple[str, ...]  # of the messages so far
    role: str | None  # of the open one

    def send(self, branch: Branch, siblings: int) -> None:
        items = branch.queued()
        for at, item in enumerate(items):
            match item.node:
                case Text(value):
                    self.transcript.append(value, plain=self.role is not None)
                case RoleBegin(role):
                    prefix, _ = branch.session.roles.around((*self.roles, role))
                    self.transcript.append(prefix, template=True)
                    self.role = role
                case RoleEnd(role):
                    self.roles = (*self.roles, role)
                    _, suffix = branch.session.roles.around(self.roles)
                    self.transcript.append(suffix, template=True)
                    self.role = None
                case ScopeBegin() | ScopeEnd() | Snapshot():
                    pass
                case Fork(children):
                    for child in children:
                        walk = _Walk(self.leader, self.transcript.fork(), self.roles, self.role)
                        walk.send(child, len(children))
                case Gen() | Select():
                    self._send_call(branch, item.node, [later.node for later in items[at + 1 :]], siblings)
                    return
                case _:
                    return

    def _send_call(self, branch: Branch, node: Gen | Select, queued: Sequence[Node], siblings: int) -> None:
        session = branch.session
        place = (branch.number, branch.calls + 1)
        call = Following(self.leader.request_id, place, branch.outlook_at(place, node.name, queued), siblings)
        options: Options = ()
        if isinstance(node, Gen):
            params, sampling = resolved(node.params, session.defaults)
            if sampling.n > 1:
                return
            prompt = _behind(self.transcript.prompt())
            request: Request = following_generation(
                session, call, node, prompt, sampling, leads=may_lead(session, params)
            )
            answer: Answer = _collected(session.client, request)
        else:
            prompt, options = self.transcript.options(node.choices)
            prompt = _behind(prompt)
            request = following_score(session, call, prompt, options)
            answer = session.client.score_request(request)
        branch.early = Early(request, prompt, options, answer)
        session.early.add(branch.early)
        if request.hold:
            session.held.add(request.request_id)


def _behind(prompt: Prompt) -> Prompt:
    """Without what stands for the leader's tokens."""
    assert isinstance(prompt.content, tuple)
    return Prompt(prompt.content[1:], prompt.heal)
