"""Calls that are sent before the one that they go on from has ended.

While a generation runs, its program has often said already what comes behind it: text and another call, or forks that
begin so. Those prompts are known but for the answer's tokens, which the engine has. So they are sent at once, as the
text behind the answer of a request that has not ended, and begin in the step after its end: no way through the
program's threads lies between the two.

    program    gen a ................. a's answer . b's answer is on its way already
    engine     [a a a a a a a a a a a][b b b b b b

What the program has not said, since it reads the answer first, is sent too where it did the same in its last runs
(habits.py).

The prompt that was sent is held against the one that the state comes to. Where they differ (a stop text cut the answer,
the text merged with it, the program does something else this time), the early call is given up and made as always. So
the text is the same, early or not.
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
from sglite.lang.habits import Forked, Habits
from sglite.lang.items import Fork, Snapshot
from sglite.lang.lower import Following, following_generation, following_score, resolved
from sglite.lang.nodes import Gen, GenParams, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from sglite.lang.outlook import Outlook, Place
from sglite.lang.session import Session
from sglite.lang.transcript import Prompt, TokenTranscript
from sglite.protocol import GenerateRequest, RequestOutput, ScoreOutput, ScoreRequest

AFTER_S = 0.004  # by then the program's code has appended what it appends without reading

Options = tuple[tuple[int, ...], ...]
Request = GenerateRequest | ScoreRequest
Answer = Coroutine[Any, Any, "list[RequestOutput] | ScoreOutput"]


class Early:
    """One call that is on its way. `prompt`: what comes behind the leader's tokens; `options` of a select."""

    def __init__(self, node: Gen | Select, request: Request, prompt: Prompt, options: Options, answer: Answer) -> None:
        self.request = request
        self._node = node
        self._prompt = prompt
        self._options = options
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(_outcome(answer))
        self._task.add_done_callback(lambda _: answer.close())  # one that was given up before it began

    def is_for(self, node: Gen | Select, leader: tuple[int, ...], prompt: Prompt, options: Options = ()) -> bool:
        """It is this call with this prompt, behind these tokens of its leader."""
        tail = cast("tuple[int, ...]", self._prompt.content)
        return (
            (node is self._node or node == self._node)
            and bool(leader)
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
        items = [item.node for item in branch.queued() if not isinstance(item.node, Snapshot)]
        for at, node in enumerate(items):
            match node:
                case Fork(children):
                    for child in children:
                        self._fork().send(child, len(children))
                case Gen() | Select():
                    place = (branch.number, branch.calls + 1)
                    outlook = branch.outlook_at(place, node.name, items[at + 1 :])
                    branch.early = self._sent(branch.session, node, place, outlook, siblings)
                    return
                case _ if not self._say(branch.session, node):
                    return
        if not any(isinstance(node, Fork) for node in items):
            self._guess(branch, items, siblings)

    def _guess(self, branch: Branch, begun: Sequence[Node], siblings: int) -> None:
        """The program has said no more than `begun`: what it did there in the runs before."""
        habits = branch.session.habits
        if habits is None or branch.rests:
            return
        for node in habits.likely((branch.number, branch.calls), begun):
            if isinstance(node, Gen | Select):
                place = (branch.number, branch.calls + 1)
                outlook = branch.outlook_at(place, node.name, ())
                branch.early = self._sent(branch.session, node, place, outlook, siblings, guessed=True)
            elif isinstance(node, Forked):
                for number in node.children:
                    if (early := self._fork()._first_call(branch, habits, number, len(node.children))) is not None:
                        branch.promised[number] = early
            else:
                self._say(branch.session, node)

    def _first_call(self, parent: Branch, habits: Habits, number: int, siblings: int) -> Early | None:
        """Of a state that is likely to come."""
        for node in habits.likely((number, 0)):
            if isinstance(node, Gen | Select):
                place = (number, 1)
                outlook = parent.outlook_at(place, node.name, ())
                return self._sent(parent.session, node, place, outlook, siblings, guessed=True)
            if not self._say(parent.session, node):
                return None
        return None

    def _fork(self) -> _Walk:
        return _Walk(self.leader, self.transcript.fork(), self.roles, self.role)

    def _say(self, session: Session, node: Node) -> bool:
        """False for what cannot be told ahead."""
        match node:
            case Text(value):
                self.transcript.append(value, plain=self.role is not None)
            case RoleBegin(role):
                prefix, _ = session.roles.around((*self.roles, role))
                self.transcript.append(prefix, template=True)
                self.role = role
            case RoleEnd(role):
                self.roles = (*self.roles, role)
                _, suffix = session.roles.around(self.roles)
                self.transcript.append(suffix, template=True)
                self.role = None
            case ScopeBegin() | ScopeEnd():
                pass
            case _:
                return False
        return True

    def _sent(
        self,
        session: Session,
        node: Gen | Select,
        place: Place,
        outlook: Outlook,
        siblings: int,
        *,
        guessed: bool = False,
    ) -> Early | None:
        """The call is on its way, if it can be."""
        call = Following(self.leader.request_id, place, outlook, siblings, guessed)
        options: Options = ()
        if isinstance(node, Gen):
            params, sampling = resolved(node.params, session.defaults)
            if sampling.n > 1:
                return None
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
        early = Early(node, request, prompt, options, answer)
        session.early.add(early)
        if request.hold:
            session.held.add(request.request_id)
        return early


def give_up_promised(branch: Branch) -> None:
    """Forks that were likely to come have not come."""
    while branch.promised:
        _, early = branch.promised.popitem()
        branch.session.early.discard(early)
        early.give_up()


def _behind(prompt: Prompt) -> Prompt:
    """Without what stands for the leader's tokens."""
    assert isinstance(prompt.content, tuple)
    return Prompt(prompt.content[1:], prompt.heal)
