"""A static program runs beside a remote engine: its graph is sent whole, and the program here reads the answers.

The program's function runs as always, so variables, values and what it returns are as always. Only its calls are not
made: their answers come in one stream, each under the number of its operation. A call whose prompt is not the one that
was answered (the run has left the graph), or whose answer does not come, is made step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from sglite.errors import SgliteError
from sglite.lang.choices import CHOICES_METHODS
from sglite.lang.client import Client, GraphClient, holds_rows, runs_graphs, shares_prompts
from sglite.lang.nodes import GenParams
from sglite.protocol import (
    Coverage,
    GenerateRequest,
    GrammarSpec,
    GraphAnswer,
    GraphRun,
    ProgramGraph,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
    ids_digest,
    with_prompt,
)

_ANSWERED = re.compile(r"\d+\.\d+")


def ahead(
    client: Client, graph: ProgramGraph | None, arguments: Mapping[str, Any], params: GenParams, *, stream: bool
) -> Client:
    """The client, or one that has the graph run where the engine is."""
    if graph is None or not runs_graphs(client) or params != GenParams() or not can_be_sent(graph):
        return client
    given = {name: arguments.get(name) for name in graph.arguments}
    if sum(node.op in ("gen", "select") for node in graph.nodes) < 2:
        return client  # one call is no slower by itself
    texts = {name: text for name, text in given.items() if isinstance(text, str)}
    if len(texts) < len(given) or len(arguments) > len(given):
        return client  # what is no text, or was known to the trace and may be another one now
    return AheadClient(client, GraphRun(graph=graph, arguments=texts, stream=stream))


def can_be_sent(graph: ProgramGraph) -> bool:
    """All that the program does is in its graph, and every choice is made by the probabilities alone."""
    return graph.complete and graph.exact and all(
        node.op != "reasoning"
        and (node.op != "select" or (node.temperature == 0 and node.method in CHOICES_METHODS))
        for node in graph.nodes
    )  # fmt: skip


class AheadClient:
    """Satisfies `sglite.lang.client.Client`, for one run."""

    def __init__(self, client: GraphClient, run: GraphRun) -> None:
        self.tokenizer = client.tokenizer
        self.model_info = client.model_info
        self.holds_rows = holds_rows(client)
        self.shares_prompts = shares_prompts(client)
        self._client = client
        self._run = run
        self._answers: dict[str, list[GraphAnswer]] = {}
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._ids: dict[str, tuple[int, ...]] = {}  # of answered calls, by request: what their rows would hold

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        whole = self._whole(request)
        place = _place(request.request_id)
        if whole is not None and await self._is_answered(place, whole):
            given = self._given(request, whole, place)
            if request.stream:
                async for output in given:
                    yield output
                return  # one that breaks off in its middle is told by the interpreter
            outputs = [output async for output in given]
            if sum(output.finished for output in outputs) == request.sampling_params.n:
                for output in outputs:
                    yield output
                return
            self._ids.pop(request.request_id, None)  # it broke off: it is made anew
        async with aclosing(self._client.stream_request(self._alone(request, whole))) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    async def _given(
        self, request: GenerateRequest, whole: tuple[int, ...], place: str
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of an answered call, as far as they come."""
        at, left, ids = 0, request.sampling_params.n, list(whole)
        while left and await self._has(place, at):
            output = self._answers[place][at].generated
            if output is None:
                return
            if at == 0:
                output = with_prompt(output, whole)
                ids = list(output.prompt_token_ids)
            if output.index == 0:
                ids += output.token_ids
            at, left = at + 1, left - output.finished
            self._ids[request.request_id] = tuple(ids)
            yield output

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        whole = self._whole(request)
        place = _place(request.request_id)
        if whole is not None and await self._is_answered(place, whole):
            scored = self._answers[place][0].scored
            if scored is not None and len(scored.logprobs) == len(request.continuations):
                self._ids[request.request_id] = whole
                return scored
        return await self._client.score_request(self._alone(request, whole))

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        return await self._client.compile_grammar(spec)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        return await self._client.warm_prefix(token_ids, namespace=namespace, lease_s=lease_s)

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def release(self, request_id: str) -> None:
        if self._ids.pop(request_id, None) is None:
            await self._client.release(request_id)

    async def end_program(self, program_id: str) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._client.end_program(program_id)

    async def flush_cache(self) -> bool:
        return await self._client.flush_cache()

    def _whole(self, request: GenerateRequest | ScoreRequest) -> tuple[int, ...] | None:
        """The whole prompt; None where it continues a row of the real client."""
        assert isinstance(request.prompt, tuple)
        if request.continue_from is None:
            return request.prompt
        known = self._ids.get(request.continue_from)
        return None if known is None else (*known[: request.keep], *request.prompt)

    def _alone(self, request: Any, whole: tuple[int, ...] | None) -> Any:
        """As the real client has to be asked, which knows no rows of answered calls."""
        if whole is None or request.continue_from is None:
            return request
        return msgspec.structs.replace(request, prompt=whole, continue_from=None, keep=None)

    async def _is_answered(self, place: str, prompt: tuple[int, ...]) -> bool:
        if not _ANSWERED.fullmatch(place):
            return False
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read())
        return await self._has(place, 0) and self._answers[place][0].prompt == ids_digest(prompt)

    async def _has(self, place: str, at: int) -> bool:
        """Wait for the answer number `at` of a call; False where none comes."""
        while len(self._answers.get(place, ())) <= at:
            if self._over:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _read(self) -> None:
        try:
            with contextlib.suppress(
                SgliteError
            ):  # what failed there is asked for here, and fails here with its reason
                async with aclosing(self._client.run_graph(self._run)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        self._answers.setdefault(answer.call, []).append(answer)
                        self._changed.set()
        finally:
            self._over = True
            self._changed.set()


def _place(request_id: str) -> str:
    """As GraphAnswer.call names it; what no graph answers (a select's other questions) has another kind of name."""
    return request_id.rpartition("-")[2]
