"""Runs one program: its function where it belongs (bridge.py), then waits for all that the function has appended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from sglite.errors import ProgramError, RequestAborted
from sglite.lang.ahead import ahead
from sglite.lang.branch import Branch
from sglite.lang.bridge import coroutine_loop, drive, program_loop, until_done, wait, wait_async, worker_pool
from sglite.lang.client import Client, takes_followers
from sglite.lang.config import client_or_default, global_config
from sglite.lang.datadep import refuse_in_trace
from sglite.lang.interpreter import carry_out
from sglite.lang.nodes import GenParams
from sglite.lang.outside import Outside
from sglite.lang.prefix import PrefixGate
from sglite.lang.program import Program
from sglite.lang.roles import roles_without_tokenizer
from sglite.lang.session import Session
from sglite.lang.state import ProgramState
from sglite.lang.timeline import Timeline
from sglite.lang.together import Together


class Run:
    """One program with its arguments, its session and its state."""

    def __init__(
        self,
        program: Program,
        arguments: Mapping[str, Any],
        params: GenParams,
        *,
        client: Client,
        stream: bool = False,
        index: int | None = None,
        gate: PrefixGate | None = None,
        together: Together | None = None,
        timeline: bool = False,
    ) -> None:
        client = ahead(client, program.graph, arguments, params, stream=stream)
        if client.tokenizer is None:
            segments, roles = None, roles_without_tokenizer(client)
        else:
            segments, roles = program.tools(client.tokenizer)
        self._program = program
        self._arguments = arguments
        self.session = Session(
            name=program.name,
            client=client,
            loop=program_loop().loop,
            posts=program_loop().posts,
            defaults=params,
            roles=roles,
            segments=segments,
            index=index,
            stream=stream,
            gate=gate,
            together=together,
            plan=program.plan,
            habits=program.habits if takes_followers(client) and not stream else None,
            timeline=_timeline(program, index, wanted=timeline),
        )
        self._flushed = False
        self._root = Branch(self.session, carry_out)
        self._inside = ProgramState(self._root)  # the function's own
        self.state = ProgramState(Outside(self._root))

    def here(self) -> ProgramState:
        """Run in this thread or greenlet. Raises ProgramError."""
        with self.session.running(self._root.notify):
            return self._here()

    def _here(self) -> ProgramState:
        try:
            self.state.ret_value = self._program.func(self._inside, **self._arguments)
        except BaseException as error:
            if _is_programs_own(error):
                shown = self._failed(error)
                raise shown from shown.__cause__
            self._stopped("the run was interrupted")
            raise
        self._returned()
        while (future := self._unfinished()) is not None:
            try:
                wait(future)
            except ProgramError:
                continue
            except BaseException:
                self._stopped("the run was interrupted")
                raise
        return self._finished()

    async def here_async(self) -> ProgramState:
        """Run an async function as a part of this task. Raises ProgramError."""
        with self.session.running(self._root.notify):
            return await self._here_async()

    async def _here_async(self) -> ProgramState:
        try:
            self.state.ret_value = await drive(self._program.func(self._inside, **self._arguments))
        except BaseException as error:
            if _is_programs_own(error):
                shown = self._failed(error)
                raise shown from shown.__cause__
            self._stopped("the run was interrupted")
            raise
        self._returned()
        while (future := self._unfinished()) is not None:
            try:
                await until_done(future)
            except BaseException:
                self._stopped("the run was cancelled")
                raise
        return self._finished()

    def start(self) -> Future[ProgramState]:
        """Run somewhere else, beside this thread."""
        if self._program.is_async:
            return coroutine_loop().submit(self.here_async())
        return worker_pool().submit(self.here, self._program.pace)

    def cancel(self, reason: str) -> None:
        self.session.cancel(reason)

    def _failed(self, error: BaseException) -> ProgramError:
        """The function raised: what it has started is stopped. Returns what to raise."""
        made = self.session.error = self.session.wrap(error, step=self.session.last_step)
        self._stopped("the program has failed")
        return made

    def _stopped(self, reason: str) -> None:
        self._returned()
        self.session.cancel(reason)
        self._release_rows()

    def _release_rows(self) -> None:
        """Rows and prefixes that were kept for calls that did not come."""
        program_loop().begin(_end(self.session))

    def _returned(self) -> None:
        if not self.session.returned.done():
            self.session.returned.set_result(None)
            self.session.posts.post(self._root.notify)

    def _unfinished(self) -> Future[Any] | None:
        """Something to wait for: the end of what some state has to do; the root comes last, for its text's sake."""
        busy = self.session.busy_branches()
        if busy:
            return busy[0].snapshot(wanted=False)
        if not self._flushed:
            self._flushed = True
            if self._root.at_rest:
                return None
            return self._root.snapshot(wanted=False)
        return None

    def _finished(self) -> ProgramState:
        self._release_rows()
        if self.session.failed:
            self.session.error = self.session.failed[0].failure()
        elif self.session.cut and self.session.cancelled is not None:
            self.session.error = self.session.wrap(RequestAborted(self.session.cancelled))
        if self.session.error is not None:
            raise self.session.error from self.session.error.__cause__
        return self.state


def _is_programs_own(error: BaseException) -> bool:
    """Its code raised it, so that it is an error of this program and of no other. Not so what ends the task or the
    interpreter. A CancelledError may be either."""
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, Exception)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return True
    return task is None or not task.cancelling()


async def _end(session: Session) -> None:
    while session.early:
        session.early.pop().give_up()
    for request_id in list(session.held):
        session.held.discard(request_id)
        await session.client.release(request_id)
    await session.client.end_program(session.program_id)


def _timeline(program: Program, index: int | None, *, wanted: bool) -> Timeline | None:
    if not wanted and global_config.timelines is None:
        return None
    made = Timeline(program.name if index is None else f"{program.name} {index}")
    if global_config.timelines is not None:
        global_config.timelines.append(made)
    return made


def run(
    program: Program, arguments: Mapping[str, Any], params: GenParams, *, backend: Any, stream: bool, timeline: bool
) -> ProgramState:
    refuse_in_trace(f"a call of program {program.name}")
    made = Run(program, arguments, params, client=client_or_default(backend), stream=stream, timeline=timeline)
    if stream:
        made.start()
        return made.state
    if not program.is_async:
        return made.here()
    future = made.start()
    try:
        return wait(future)
    except BaseException:
        future.cancel()
        made.cancel("the run was interrupted")
        raise


async def run_async(
    program: Program, arguments: Mapping[str, Any], params: GenParams, *, backend: Any, stream: bool, timeline: bool
) -> ProgramState:
    refuse_in_trace(f"a call of program {program.name}")
    made = Run(program, arguments, params, client=client_or_default(backend), stream=stream, timeline=timeline)
    if stream:
        made.start()
        return made.state
    if program.is_async:
        return await made.here_async()
    future = made.start()
    try:
        return await wait_async(future)
    except BaseException:
        made.cancel("the run was cancelled")
        raise
