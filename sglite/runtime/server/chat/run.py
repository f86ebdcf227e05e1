"""A prepared turn carried out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from sglite.protocol import GenerateRequest, RequestOutput, Usage
from sglite.runtime.server.chat.parts import Part
from sglite.runtime.server.chat.turn import Answer, PreparedTurn, Turn
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.tokenise import THREAD_CHARS


class Progress(NamedTuple):
    answer: Answer  # as it stands after this
    parts: list[Part]  # what this adds
    output: RequestOutput


async def prepare(service: Service, turn: Turn) -> PreparedTurn:
    size = sum(len(str(message.get("content") or "")) for message in turn.messages)
    if size < THREAD_CHARS and not turn.tools:
        return service.turns.prepare(turn)
    return await service.prompt_threads.run(lambda: service.turns.prepare(turn))


async def progress(
    service: Service, prepared: PreparedTurn, call: Call, *, stream: bool
) -> AsyncGenerator[Progress, None]:
    """All completions of the turn as they grow. Raises what ended them; closing it aborts them."""
    turn = prepared.turn
    answers = [prepared.answer(index) for index in range(turn.sampling.n)]
    request = GenerateRequest(
        request_id="",
        prompt=prepared.prompt,
        sampling_params=turn.sampling,
        grammar=prepared.grammar,
        grammar_after=prepared.grammar_after,
        think_budget=turn.think_budget,
        close_on_budget=turn.close_on_budget,
        jump_forward=turn.jump_forward,
        stream=stream,
        truncate_prompt=turn.truncate_prompt,
    )
    async with aclosing(service.outputs(request, call)) as outputs:
        async for output in outputs:
            answer = answers[output.index]
            yield Progress(answer, answer.take(output), output)


def total_usage(answers: list[Answer]) -> Usage:
    """Of all completions together; the prompt that they share counts once."""
    total = Usage()
    for answer in answers:
        total = total + answer.usage
    first = answers[0].usage
    return Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=min((a.usage.cached_tokens for a in answers), default=0),
        completion_tokens=total.completion_tokens,
        forced_tokens=total.forced_tokens,
        draft_tokens=total.draft_tokens,
        accepted_draft_tokens=total.accepted_draft_tokens,
    )
