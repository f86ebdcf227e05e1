"""POST /generate: SGLang's native endpoint, for its frontend and its users' scripts.

A stream's `text` is everything so far, as there. `meta_info` has SGLang's names; logprobs are [value, id, text].
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.protocol import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from sglite.runtime.async_engine.arguments import sampling_params, split_truncate
from sglite.runtime.server import convert
from sglite.runtime.server import openai_shapes as shapes
from sglite.runtime.server.body import make_router
from sglite.runtime.server.config import Limits
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.merge import all_of, merged
from sglite.runtime.server.routes.completions import prompt_ids
from sglite.runtime.server.schemas.generate import GenerateBody
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import DONE, EventStream, event, guarded, json_response, primed, while_connected

router = make_router()

# Fields of SGLang's sampling parameters that ask for what happens here anyway.
_GIVEN = {"spaces_between_special_tokens": True}
_RID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class _Job:
    request: GenerateRequest
    rid: str
    wants_logprobs: bool
    start: int  # first prompt position whose logprob is returned
    with_text: bool


@dataclass(slots=True)
class _State:
    """One completion so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] = ()


@router.post("/generate")
async def generate(body: GenerateBody, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Complete one prompt or several, with SGLang's request and answer."""
    jobs, single = await _jobs(service, body, call)
    if body.stream:
        events = await while_connected(request, primed(_stream(service, jobs, call, single=single)))
        return EventStream(guarded(events, request.url.path))
    return json_response(await while_connected(request, _whole(service, jobs, call, single=single)))


async def _jobs(service: Service, body: GenerateBody, call: Call) -> tuple[list[_Job], bool]:
    if body.image_data is not None:
        raise InvalidRequest("this model takes text only", param="image_data")
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    prompts = await prompt_ids(service, given, any_length=_may_truncate(body))
    single = isinstance(given, str) or bool(given and isinstance(given[0], int))
    count = len(prompts)
    params = _each(body.sampling_params, count, "sampling_params", {})
    wants = _each(body.return_logprob, count, "return_logprob", False)
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num", 0)
    starts = _each(body.logprob_start_len, count, "logprob_start_len", -1)
    rids = _each(body.rid, count, "rid", None)
    jobs: list[_Job] = []
    for prompt, raw, want, top, start, rid in zip(prompts, params, wants, tops, starts, rids, strict=True):
        if rid is not None and not _RID.fullmatch(rid):
            raise InvalidRequest("rid takes up to 128 letters, digits and . _ : -", param="rid")
        if not -1 <= start <= len(prompt):
            raise InvalidRequest("logprob_start_len lies outside the prompt", param="logprob_start_len")
        start = len(prompt) if start == -1 else start
        request = _request(service, call, body, prompt, raw, logprobs=top if want else None, start=start)
        own_id = rid or call.request_id().partition(":")[2]
        jobs.append(_Job(request, own_id, bool(want), start, body.return_text_in_logprobs))
    return jobs, single


def _may_truncate(body: GenerateBody) -> bool:
    params = body.sampling_params
    each = params if isinstance(params, list) else [params or {}]
    return body.truncate_prompt or any(one.get("truncate_prompt") for one in each)


def _request(
    service: Service,
    call: Call,
    body: GenerateBody,
    prompt: tuple[int, ...],
    raw: Any,
    *,
    logprobs: int | None,
    start: int,
) -> GenerateRequest:
    limits = service.config.limits
    values = {name: value for name, value in raw.items() if _GIVEN.get(name) != value}
    for name in ("json_schema", "regex", "ebnf", "structural_tag", "lark", "choices"):
        if values.get(name) is not None:
            convert.check_size(name, values[name], limits)
    if logprobs is not None:
        convert.at_most("top_logprobs_num", logprobs, limits.max_logprobs)
        values["logprobs"] = logprobs
        if start < len(prompt):
            values["prompt_logprobs"] = logprobs
    given, truncate = split_truncate({name: value for name, value in values.items() if value is not None})
    params, grammar = sampling_params(
        given,
        whitespace=body.whitespace,
        on_unsupported=body.on_unsupported,
    )
    _check(params, limits)
    if params.prompt_logprobs is not None:
        total = len(prompt) * (params.prompt_logprobs + 1)
        convert.at_most("the number of prompt logprobs", total, limits.max_prompt_logprob_values)
    return GenerateRequest(
        request_id="",
        prompt=prompt,
        sampling_params=params,
        grammar=grammar,
        heal=body.heal,
        close_on_budget=body.close_on_budget,
        jump_forward=body.jump_forward,
        stream=body.stream,
        truncate_prompt=body.truncate_prompt or truncate,
        program=None if body.program is None else service.programs.ref(call.tenant, body.program),
        priority=max(0, body.priority or 0),  # a client may step back, not forward
    )


def _check(params: SamplingParams, limits: Limits) -> None:
    convert.at_most("n", params.n, limits.max_n)
    convert.at_most("prompt_logprobs", params.prompt_logprobs or 0, limits.max_logprobs)
    convert.at_most("logprobs", params.logprobs or 0, limits.max_logprobs)
    convert.at_most("the number of logit_bias entries", len(params.logit_bias or ()), limits.max_logit_bias)
    convert.at_most("the number of stop_token_ids", len(params.stop_token_ids), limits.max_logit_bias)
    convert.stop_texts(params.stop, limits)
    convert.stop_texts(params.stop_regex, limits, param="stop_regex")


def _each(given: Any, count: int, name: str, default: Any) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(given, list):
        return [default if given is None else given] * count
    if len(given) != count:
        raise InvalidRequest(f"{count} prompts but {len(given)} values of {name}", param=name)
    return given


async def _whole(service: Service, jobs: Sequence[_Job], call: Call, *, single: bool) -> Any:
    if all(map(_only_scores, jobs)):
        scored = await _scores(service, jobs, call)
        return scored[0] if single else scored
    answers = [answer for found in await all_of([_answers(service, job, call) for job in jobs]) for answer in found]
    return answers[0] if single and len(answers) == 1 else answers


def _only_scores(job: _Job) -> bool:
    """Nothing is asked for but the logprobs of a prompt's end: `select` in SGLang's frontend."""
    params = job.request.sampling_params
    plain = params.max_tokens == 0 and params.n == 1 and not params.logprobs and job.request.grammar is None
    return plain and job.wants_logprobs and 1 <= job.start < len(job.request.prompt)


async def _scores(service: Service, jobs: Sequence[_Job], call: Call) -> list[dict[str, Any]]:
    """As scored continuations: the shared beginning is computed once, and comes from the cache where it is there."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        groups.setdefault(tuple(map(int, job.request.prompt[: job.start])), []).append(i)
    found: dict[int, dict[str, Any]] = {}
    for prompt, members in groups.items():
        ends = tuple(tuple(map(int, jobs[i].request.prompt[len(prompt) :])) for i in members)
        output = await service.score(
            ScoreRequest(request_id="", prompt=prompt, continuations=ends, program=jobs[members[0]].request.program),
            call,
        )
        for i, end, logprobs in zip(members, ends, output.logprobs, strict=True):
            usage = Usage(prompt_tokens=len(prompt) + len(end), cached_tokens=output.usage.cached_tokens)
            final = RequestOutput(request_id="", finish_reason=FinishReason.LENGTH, usage=usage)
            entries = [TokenLogprob(t, p) for t, p in zip(end, logprobs, strict=True)]
            found[i] = _answer(service, jobs[i], _State(prompt_logprobs=[None] * len(prompt) + entries), final)
    return [answer for _, answer in sorted(found.items())]


async def _answers(service: Service, job: _Job, call: Call) -> list[dict[str, Any]]:
    states: dict[int, _State] = {}
    found: dict[int, dict[str, Any]] = {}
    async with aclosing(service.outputs(job.request, call, rid=job.rid)) as outputs:
        async for output in outputs:
            state = _grown(states, output)
            if output.finished:
                answer = partial(_answer, service, job, state, output)
                values = (len(state.logprobs) + len(state.prompt_logprobs)) if job.wants_logprobs else 0
                found[output.index] = await service.prompt_threads.shape(answer, values=values)
    return [answer for _, answer in sorted(found.items())]


async def _stream(service: Service, jobs: Sequence[_Job], call: Call, *, single: bool) -> AsyncGenerator[bytes, None]:
    states: list[dict[int, _State]] = [{} for _ in jobs]
    n = jobs[0].request.sampling_params.n
    streams = [service.outputs(job.request, call, rid=job.rid) for job in jobs]
    async with aclosing(merged(streams)) as outputs:
        async for which, output in outputs:
            answer = _answer(service, jobs[which], _grown(states[which], output), output)
            yield event(answer if single and n == 1 else {**answer, "index": which * n + output.index})
    yield DONE


def _grown(states: dict[int, _State], output: RequestOutput) -> _State:
    state = states.setdefault(output.index, _State())
    state.text += output.text
    state.token_ids += output.token_ids
    state.logprobs += output.logprobs
    state.prompt_logprobs = output.prompt_logprobs or state.prompt_logprobs
    return state


def _answer(service: Service, job: _Job, state: _State, output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    meta: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": _finish(output),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "forced_tokens": usage.forced_tokens,
    }
    missing = shapes.unenforced(output.coverage) if output.finished else []
    if missing:
        meta["unenforced"] = missing
    if job.wants_logprobs:
        meta["output_token_logprobs"] = [_entry(service, job, e) for e in state.logprobs]
        meta["output_top_logprobs"] = [_top(service, job, e) for e in state.logprobs]
        meta["input_token_logprobs"] = _prompt_entries(service, job, state)
        meta["input_top_logprobs"] = [
            None if e is None else _top(service, job, e) for e in state.prompt_logprobs[job.start :]
        ]
    return {"text": state.text, "output_ids": state.token_ids, "meta_info": meta}


def _prompt_entries(service: Service, job: _Job, state: _State) -> list[list[Any]]:
    found: list[list[Any]] = []
    for position in range(job.start, len(state.prompt_logprobs)):
        entry = state.prompt_logprobs[position]
        token_id = int(job.request.prompt[position])
        text = shapes.token_text(service.tokenizer, token_id) if job.with_text else None
        found.append([None if entry is None else shapes.finite(entry.logprob), token_id, text])
    return found


def _entry(service: Service, job: _Job, entry: TokenLogprob) -> list[Any]:
    text = shapes.token_text(service.tokenizer, entry.token_id) if job.with_text else None
    return [shapes.finite(entry.logprob), entry.token_id, text]


def _top(service: Service, job: _Job, entry: TokenLogprob) -> list[list[Any]]:
    return [_entry(service, job, TokenLogprob(token_id, logprob)) for token_id, logprob in entry.top]


def _finish(output: RequestOutput) -> dict[str, Any] | None:
    match shapes.finish_reason(output.finish_reason, called=False):
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": output.matched_stop}
        case "length":
            return {"type": "length", "length": output.usage.completion_tokens}
        case other:
            return {"type": other, "message": output.reason}
