"""Carries out the operations of a state against a client: one method an operation.

All of it runs on the program loop, as the task of one state (branch.py). An error ends that state and no other.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from sglite.errors import BackendError, IncompleteOutput, InvalidRequest, ProgramSyntaxError, SgliteError
from sglite.lang.branch import Branch
from sglite.lang.choices import Evidence, probabilities
from sglite.lang.client import takes_chats
from sglite.lang.early import Early, give_up_promised, may_lead, send_soon
from sglite.lang.items import NOTHING_SAID, Concatenate, Fork, Held, Item, Later, Outcome, Slot, Snapshot, told
from sglite.lang.lower import (
    R,
    gen_meta,
    generate_request,
    resolved,
    score_request,
    select_meta,
    total_usage,
    unconditional_requests,
    unconditional_row,
    whole_request,
)
from sglite.lang.nodes import (
    Gen,
    GenParams,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Text,
)
from sglite.lang.reasoning import markers_of, split_reasoning
from sglite.lang.session import Session
from sglite.lang.timeline import Span, Timeline
from sglite.lang.transcript import Prompt, text_since
from sglite.protocol import (
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
    Timing,
    Usage,
    merge_outputs,
)

T = TypeVar("T")
_Method = Callable[[Branch, Any, Item], Awaitable[None]]

_ROW_IS_GONE = ("continue_from", "base")  # what an engine, or a server, does not know any more
_CHOICE_TOKENS = 256  # for a backend that has to write the chosen text


async def carry_out(branch: Branch, item: Item) -> None:
    """Raises ProgramSyntaxError for an operation that no method below knows."""
    method = _METHODS.get(type(item.node))
    if method is None:
        raise ProgramSyntaxError(f"the interpreter does not know {item.node!r}")
    if branch.session.habits is not None:
        branch.follows.carried_out(item.node, branch.place, branch.session.habits)
    branch.calls += isinstance(item.node, Gen | Select)
    if branch.session.timeline is None or not isinstance(item.node, Gen | Select):
        await method(branch, item.node, item)
    else:
        await _recorded(branch, item.node, item, method, branch.session.timeline)


async def _recorded(branch: Branch, node: Gen | Select, item: Item, method: _Method, timeline: Timeline) -> None:
    """Carry a call out and write down when, and what came of it."""
    start = timeline.now()
    position = len(branch.transcript.pieces)
    first: list[float] = []

    async def watch() -> None:
        while len(branch.transcript.pieces) <= position:
            await branch.changed()
        first.append(timeline.now())

    watcher = asyncio.ensure_future(watch()) if branch.session.stream else None
    branch.last_meta = {}
    error: str | None = None
    try:
        await method(branch, node, item)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        raise
    finally:
        if watcher is not None:
            watcher.cancel()
        meta = branch.last_meta
        finish = (meta.get("finish_reason") or {}).get("type")
        timing: Timing | None = meta.get("timing")
        timeline.add(
            Span(
                kind="gen" if isinstance(node, Gen) else "select",
                name=node.name,
                branch=branch.lane,
                step=item.step,
                start=start,
                end=timeline.now(),
                first=first[0] if first else None,
                queued=None if timing is None else timing.queue_s,
                computed=None if timing is None else timing.step_s,
                steps=None if timing is None else timing.steps,
                text="".join(branch.transcript.pieces[position:]),
                usage=meta.get("usage", Usage()),
                finish=finish,
                constraint=node.grammar.kind if isinstance(node, Gen) and node.grammar is not None else None,
                error=error,
            )
        )


async def _text(branch: Branch, node: Text, item: Item) -> None:
    # Inside a message an author's variable may hold anything; outside, authors write templates by hand.
    branch.transcript.append(node.value, plain=branch.role is not None)


async def _gen(branch: Branch, gen: Gen, item: Item) -> None:
    session = branch.session
    params, sampling = resolved(gen.params, session.defaults)
    prompt = branch.transcript.prompt()
    early, given_up = _sent_early(branch, gen, prompt)
    leads = may_lead(session, params)
    if early is not None:
        request = cast("GenerateRequest", early.request)
    else:
        await _turn_to_call(session, prompt)
        request = _made_anew(generate_request(branch, gen, prompt, sampling, leads=leads), given_up)
    branch.siblings = 1
    slot = item.slots.get(gen.name) if gen.name is not None else None

    async def send(wanted: GenerateRequest) -> list[RequestOutput]:
        if early is not None and wanted is early.request:
            stream = early.outputs()
        else:
            stream = _stream(branch, wanted)
        return await _outputs(branch, stream, wanted, params, slot)

    timer = send_soon(branch, request) if leads else None
    try:
        request, outputs = await _continued_or_whole(branch, request, prompt, send)
    finally:
        if timer is not None:
            timer.cancel()
    branch.last_request_id = request.request_id
    if params.max_tokens == 0:
        outputs = [msgspec.structs.replace(output, text="", token_ids=()) for output in outputs]
    first = outputs[0]
    cut = isinstance(first.matched_stop, str)
    branch.transcript.generated(first.token_ids, first.text, prompt, first.prompt_token_ids, cut=cut)
    used = first.prompt_token_ids
    branch.leader = (*used, *first.token_ids) if used else ()
    if request.hold:
        await _keep(branch, request.request_id, branch.leader)
    session.add_usage(total_usage(outputs))
    if session.timeline is not None:
        branch.last_meta = gen_meta(request, first, params, session.client.tokenizer)
    if slot is not None and gen.name is not None:
        outcome = _gen_outcome(gen, params, request, outputs, session.client.tokenizer)
        branch.written[gen.name] = outcome
        slot.future.set_result(outcome)


async def _turn_to_call(session: Session, prompt: Prompt) -> None:
    """What all programs of a batch begin with goes first, and calls that come together go together."""
    if session.gate is not None and isinstance(prompt.content, tuple):
        session.warmed_tokens = await session.gate.first_prompt(session, prompt.content)
    if session.together is not None:
        await session.together.with_others()


def _sent_early(
    branch: Branch, node: Gen | Select, prompt: Prompt, options: tuple[tuple[int, ...], ...] = ()
) -> tuple[Early | None, bool]:
    """The call that is to be made, if it was sent already; and whether another one was, which is given up."""
    give_up_promised(branch)
    early, branch.early = branch.early, None
    if early is None:
        return None, False
    branch.session.early.discard(early)
    if early.is_for(node, branch.leader, prompt, options):
        return early, False
    early.give_up()
    return None, True


def _made_anew(request: R, given_up: bool) -> R:
    """The id of a call that was given up is in use until the engine knows of it."""
    return msgspec.structs.replace(request, request_id=f"{request.request_id}e") if given_up else request


async def _continued_or_whole(
    branch: Branch, request: R, prompt: Prompt, send: Callable[[R], Awaitable[T]]
) -> tuple[R, T]:
    """The request that was carried out, and its answer. A row that is not kept any more costs a new admission."""
    held, branch.held = branch.held, None
    if request.hold:
        branch.session.held.add(request.request_id)
    try:
        return request, await send(request)
    except InvalidRequest as error:
        if request.continue_from is None or error.param not in _ROW_IS_GONE:
            raise
        whole = whole_request(request, prompt)
        if request.hold:
            branch.session.held.add(whole.request_id)
        return whole, await send(whole)
    finally:
        if held is not None:
            await _release(branch, held.request_id)


async def _keep(branch: Branch, request_id: str, ids: tuple[int, ...]) -> None:
    """The row `ids` of a call goes on in the next one, unless it has become clear that none follows."""
    if ids and (branch.has_queued or not branch.rests):
        branch.held = Held(request_id, ids)
    else:
        await _release(branch, request_id)


async def _release(branch: Branch, request_id: str) -> None:
    branch.session.held.discard(request_id)
    await branch.session.client.release(request_id)


async def _outputs(
    branch: Branch,
    stream: AsyncGenerator[RequestOutput],
    request: GenerateRequest,
    params: GenParams,
    slot: Slot | None,
) -> list[RequestOutput]:
    """One merged output a completion; what comes of the first one is shown as it comes."""
    pieces: list[list[RequestOutput]] = [[] for _ in range(request.sampling_params.n)]
    client = branch.session.client
    async with aclosing(stream) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise output.error.to_exception()
            if not 0 <= output.index < len(pieces):
                raise BackendError(f"the backend answered completion {output.index} of {len(pieces)}")
            pieces[output.index].append(output)
            if output.index == 0 and params.max_tokens != 0:
                if slot is not None:
                    made = partial(gen_meta, request, output, params, client.tokenizer)
                    slot.pieces.append((output.text, Later(made)))
                branch.show(output.text)
    return [_whole(outputs) for outputs in pieces]


def _whole(pieces: list[RequestOutput]) -> RequestOutput:
    """Raises where the backend did not bring its answer to an end, or the answer is none."""
    if not pieces:
        raise BackendError("the backend ended the stream without an answer")
    output = merge_outputs(pieces)
    if not output.finished:
        raise BackendError("the stream ended before the answer did")
    if output.finish_reason is FinishReason.ABORT:
        raise BackendError("the backend gave the answer up before its end")
    if output.finish_reason is FinishReason.SCHEMA_VIOLATION:
        raise SgliteError(f"the output violates the constraint: {output.reason}")
    return output


def _stream(branch: Branch, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
    """The client's answer; clients give generators, which abort the request when they are closed."""
    client = branch.session.client
    if takes_chats(client):
        stream = client.stream_chat(_chat_messages(branch), request)
    else:
        stream = client.stream_request(request)
    return cast("AsyncGenerator[RequestOutput]", stream)


def _gen_outcome(
    gen: Gen, params: GenParams, request: GenerateRequest, outputs: list[RequestOutput], tokenizer: Any
) -> Outcome:
    texts = [output.text for output in outputs]
    values = texts if gen.parse is None else [_parsed(gen, output) for output in outputs]
    metas = [Later(partial(gen_meta, request, output, params, tokenizer)) for output in outputs]
    if (params.n or 1) == 1:
        return Outcome(values[0], texts[0], metas[0])
    return Outcome(values, texts, metas)


def _parsed(gen: Gen, output: RequestOutput) -> Any:
    assert gen.parse is not None
    try:
        return gen.parse(output.text)
    except ValueError as error:
        if output.finish_reason is FinishReason.LENGTH:
            raise IncompleteOutput(
                f"the output reached its limit of {output.usage.completion_tokens} tokens before the value was "
                "complete; raise max_tokens",
                param="max_tokens",
            ) from error
        raise


def _chat_messages(branch: Branch) -> list[dict[str, Any]]:
    """The chat up to here, for a client that takes messages. Raises ProgramSyntaxError where it is not the
    assistant's turn, or the turn has text already."""
    if branch.role != "assistant" or branch.role_mark is None:
        raise ProgramSyntaxError("this backend takes chats only: generate inside sglite.assistant(...)")
    if text_since(branch.transcript, branch.role_mark):
        raise ProgramSyntaxError(
            "this backend cannot continue a message that has text already: let gen(...) be the first in assistant(...)"
        )
    return branch.chat


async def _select(branch: Branch, select: Select, item: Item) -> None:
    slot = item.slots.get(select.name) if select.name is not None else None
    if branch.session.client.tokenizer is None:
        outcome = await _select_by_text(branch, select)
    else:
        outcome = await _select_by_score(branch, select)
    if branch.session.timeline is not None:
        branch.last_meta = told(outcome.meta)
    branch.transcript.append(outcome.raw, plain=branch.role is not None)
    branch.notify()
    if slot is not None and select.name is not None:
        branch.written[select.name] = outcome
        slot.pieces.append((outcome.raw, outcome.meta))
        slot.future.set_result(outcome)


async def _select_by_score(branch: Branch, select: Select) -> Outcome:
    session = branch.session
    assert session.segments is not None
    prompt, options = branch.transcript.options(select.choices)
    early, given_up = _sent_early(branch, select, prompt, options)
    if early is not None:
        request = cast("ScoreRequest", early.request)
    else:
        await _turn_to_call(session, prompt)
        request = _made_anew(score_request(branch, prompt, options, select.name), given_up)
    branch.siblings = 1
    branch.leader = ()
    score = session.client.score_request

    async def send(wanted: ScoreRequest) -> ScoreOutput:
        if early is not None and wanted is early.request:
            return await early.scored()
        return await score(wanted)

    unconditional = unconditional_requests(branch, options) if select.method.needs_unconditional else []
    alone: list[ScoreOutput | None] = []
    if unconditional:
        (request, output), alone = await asyncio.gather(
            _continued_or_whole(branch, request, prompt, send),
            asyncio.gather(*(_maybe(score, wanted) for wanted in unconditional)),
        )
    else:
        request, output = await _continued_or_whole(branch, request, prompt, send)
    branch.last_request_id = request.request_id
    if output.error is not None:
        raise output.error.to_exception()
    if request.hold:
        assert isinstance(prompt.content, tuple)
        await _keep(branch, request.request_id, prompt.content)
    evidence = Evidence(output.logprobs, tuple(map(unconditional_row, alone)) if alone else None)
    # Dice without a seed ask the system for one, which costs more than all the rest; the best option needs none.
    rng = random.Random(select.seed if select.temperature > 0 else 0)
    index = select.method.walk(evidence, temperature=select.temperature, rng=rng)
    usage = output.usage
    for other in alone:
        usage = usage + (other.usage if other is not None else Usage())
    session.add_usage(usage)
    segments = session.segments

    def meta() -> dict[str, Any]:
        shares = probabilities(output.logprobs)
        made = select_meta(select, evidence, options, shares, usage, segments.token_text)
        return made | {"timing": output.timing}

    return Outcome(select.choices[index], select.choices[index], Later(meta))


async def _maybe(call: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    return None if request is None else await call(request)


async def _select_by_text(branch: Branch, select: Select) -> Outcome:
    """A client without a tokenizer cannot score: it writes one of the options under a constraint."""
    if select.method.name != "token_length_normalized":
        raise ProgramSyntaxError(f"this backend cannot score options, which {select.method.name} needs")
    gen = Gen(
        name=select.name,
        params=GenParams(temperature=select.temperature, seed=select.seed, max_tokens=_CHOICE_TOKENS),
        grammar=GrammarSpec(kind="choice", source=json.dumps(select.choices)),
    )
    params, sampling = resolved(gen.params, GenParams())
    request = generate_request(branch, gen, branch.transcript.prompt(), sampling, leads=False)
    async with aclosing(_stream(branch, request)) as outputs:
        output = _whole([o async for o in outputs])
    if output.text not in select.choices:
        raise SgliteError(f"the backend answered {output.text!r}, which is none of the choices")
    branch.session.add_usage(output.usage)
    return Outcome(output.text, output.text, gen_meta(request, output, params, None))


async def _role_begin(branch: Branch, node: RoleBegin, item: Item) -> None:
    prefix, _ = branch.session.roles.around((*(m["role"] for m in branch.chat), node.role))
    branch.transcript.append(prefix, template=True)
    branch.role = node.role
    branch.role_mark = branch.transcript.mark()


async def _role_end(branch: Branch, node: RoleEnd, item: Item) -> None:
    assert branch.role_mark is not None
    _, suffix = branch.session.roles.around((*(m["role"] for m in branch.chat), node.role))
    content = text_since(branch.transcript, branch.role_mark)
    branch.chat = [*branch.chat, {"role": node.role, "content": content}]
    branch.transcript.append(suffix, template=True)
    branch.role = branch.role_mark = None


async def _scope_begin(branch: Branch, node: ScopeBegin, item: Item) -> None:
    branch.scopes.setdefault(node.name, []).append(branch.transcript.mark())


async def _scope_end(branch: Branch, node: ScopeEnd, item: Item) -> None:
    text = text_since(branch.transcript, branch.scopes[node.name].pop())
    item.slots[node.name].future.set_result(Outcome(text, text))


async def _separate_reasoning(branch: Branch, node: SeparateReasoning, item: Item) -> None:
    """The transcript's message goes on with the answers alone, as the model would see it in its next turn."""
    markers = markers_of(node.model_type)
    answers: list[str] = []
    for name in node.names:
        found = branch.written[name]
        reasoning, answer = split_reasoning(found.raw, markers)
        answers.append(answer)
        item.slots[name].future.set_result(replace(found, value=answer, raw=answer))
        item.slots[f"{name}_reasoning_content"].future.set_result(Outcome(reasoning, reasoning))
    if branch.role_mark is not None and not branch.session.stream:
        branch.transcript.rewind(branch.role_mark)
        branch.transcript.append("".join(answers), plain=True)


async def _fork(branch: Branch, node: Fork, item: Item) -> None:
    for child in node.children:
        child.early = child.early or branch.promised.pop(child.number, None)
        child.seed(branch, siblings=len(node.children))
    give_up_promised(branch)
    held = branch.held
    if held is not None and branch.rests and not any(isinstance(one.node, Gen | Select) for one in branch.queued()):
        branch.held = None  # it was kept for the forks' sake
        await _release(branch, held.request_id)


async def _snapshot(branch: Branch, node: Snapshot, item: Item) -> None:
    node.future.set_result(branch.said() if node.wanted else NOTHING_SAID)


async def _concatenate(branch: Branch, node: Concatenate, item: Item) -> None:
    for said in node.said:
        branch.transcript.append(said.text_since_fork, plain=branch.role is not None)
        if branch.role is None:
            branch.chat = [*branch.chat, *said.messages_since_fork]


_METHODS: dict[type[Node], _Method] = {
    Text: _text,
    Gen: _gen,
    Select: _select,
    RoleBegin: _role_begin,
    RoleEnd: _role_end,
    ScopeBegin: _scope_begin,
    ScopeEnd: _scope_end,
    SeparateReasoning: _separate_reasoning,
    Fork: _fork,
    Snapshot: _snapshot,
    Concatenate: _concatenate,
}
