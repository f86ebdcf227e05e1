"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from sglite.errors import InvalidRequest, PromptTooLong
from sglite.protocol import GenerateRequest, RequestOutput, Usage, merge_outputs
from sglite.runtime.server import convert
from sglite.runtime.server import openai_shapes as shapes
from sglite.runtime.server.body import make_router
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.merge import all_of, merged
from sglite.runtime.server.schemas.completions import CompletionRequest
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import DONE, EventStream, event, guarded, json_response, primed, while_connected

router = make_router()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Complete one prompt or several."""
    service.check_model(body.model)
    requests = await _requests(service, body)
    frame = {
        "id": f"cmpl-{call.record.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
    if body.stream:
        events = await while_connected(request, primed(_stream(service, requests, call, body, frame)))
        return EventStream(guarded(events, request.url.path))
    return json_response(await while_connected(request, _whole(service, requests, call, body, frame)))


async def _requests(service: Service, body: CompletionRequest) -> list[GenerateRequest]:
    limits = service.config.limits
    convert.check_metadata(body, limits)
    if body.suffix is not None:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of other than n is not supported", param="best_of")
    params = convert.sampling(
        body,
        limits,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    grammar = convert.constraint(body, body.response_format, limits)
    prompts = await prompt_ids(service, body.prompt, any_length=body.truncate_prompt)
    if body.echo and body.logprobs is not None:
        values = sum(map(len, prompts)) * (body.logprobs + 1)
        convert.at_most("the number of prompt logprobs", values, limits.max_prompt_logprob_values, param="logprobs")
    return [
        GenerateRequest(
            request_id="",
            prompt=prompt,
            sampling_params=params,
            grammar=grammar,
            close_on_budget=body.close_on_budget,
            jump_forward=body.jump_forward,
            stream=bool(body.stream),
            truncate_prompt=body.truncate_prompt,
        )
        for prompt in prompts
    ]


async def prompt_ids(
    service: Service, prompt: str | Sequence[Any], *, any_length: bool = False
) -> list[tuple[int, ...]]:
    """Text, ids, or a list of either, as lists of ids. Raises PromptTooLong early for what is much too long, unless
    `any_length`."""
    if isinstance(prompt, str):
        given: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        given = [prompt]
    else:
        given = list(prompt)
    if not given:
        raise InvalidRequest("there is no prompt", param="prompt")
    convert.at_most("the number of prompts", len(given), service.config.limits.max_prompts, param="prompt")
    longest = service.engine.model_info.max_model_len
    found: list[tuple[int, ...]] = []
    for each in given:
        if isinstance(each, str):
            convert.encoded(each, "prompt")
            found.append(await service.encoded(each, add_special_tokens=True, any_length=any_length))
        elif not any_length and 0 < longest < len(each):
            raise PromptTooLong(f"the prompt has {len(each)} tokens and the context holds {longest}", param="prompt")
        else:
            found.append(tuple(each))
    return found


async def _whole(
    service: Service,
    requests: Sequence[GenerateRequest],
    call: Call,
    body: CompletionRequest,
    frame: Mapping[str, Any],
) -> dict[str, Any]:
    async def one(request: GenerateRequest) -> list[RequestOutput]:
        pieces: dict[int, list[RequestOutput]] = {}
        async with aclosing(service.outputs(request, call)) as outputs:
            async for output in outputs:
                pieces.setdefault(output.index, []).append(output)
        return [merge_outputs(found) for _, found in sorted(pieces.items())]

    answers = await all_of([one(request) for request in requests])
    choices: list[dict[str, Any]] = []
    total = Usage()
    for request, outputs in zip(requests, answers, strict=True):
        total = total + _usage(outputs)
        for output in outputs:
            choice = partial(_choice, service, request, output, body, index=len(choices))
            values = (len(output.logprobs) + len(output.prompt_logprobs)) * (1 + (body.logprobs or 0))
            choices.append(await service.prompt_threads.shape(choice, values=values))
    missing = shapes.unenforced(answers[0][0].coverage)
    return {
        **frame,
        "choices": choices,
        "usage": shapes.usage(total),
        **({"unenforced": missing} if missing else {}),
    }


def _choice(
    service: Service, request: GenerateRequest, output: RequestOutput, body: CompletionRequest, *, index: int
) -> dict[str, Any]:
    text = output.text
    ids, entries = list(output.token_ids), list(output.logprobs)
    if body.echo:
        assert not isinstance(request.prompt, str)
        text = service.tokenizer.decode(request.prompt) + text
        ids = [*request.prompt, *ids]
        entries = [*output.prompt_logprobs, *entries]  # type: ignore[list-item]
    return {
        "index": index,
        "text": text,
        "logprobs": None
        if body.logprobs is None
        else shapes.completion_logprobs(service.tokenizer, entries, token_ids=ids, offset=0),
        "finish_reason": shapes.finish_reason(output.finish_reason, called=False),
        "stop_reason": output.matched_stop if isinstance(output.matched_stop, str) else None,
        **({"reason": output.reason} if output.reason else {}),
    }


async def _stream(
    service: Service,
    requests: Sequence[GenerateRequest],
    call: Call,
    body: CompletionRequest,
    frame: Mapping[str, Any],
) -> AsyncGenerator[bytes, None]:
    n = requests[0].sampling_params.n
    offsets: dict[int, int] = {}
    usages: dict[tuple[int, int], RequestOutput] = {}
    async with aclosing(merged([service.outputs(request, call) for request in requests])) as outputs:
        async for which, output in outputs:
            index = which * n + output.index
            if index not in offsets:
                offsets[index] = 0
                if body.echo:
                    echoed = _echo(service, requests[which], output, body)
                    offsets[index] = len(echoed["text"])
                    yield event({**frame, "choices": [{**echoed, "index": index}]})
            missing = shapes.unenforced(output.coverage) if output.finished else []
            piece = _piece(service, output, body, index=index, offset=offsets[index])
            yield event({**frame, "choices": [piece], **({"unenforced": missing} if missing else {})})
            offsets[index] += len(output.text)
            if output.finished:
                usages[which, output.index] = output
    if body.stream_options is not None and body.stream_options.include_usage:
        total = Usage()
        for which in range(len(requests)):
            total = total + _usage([o for (w, _), o in sorted(usages.items()) if w == which])
        yield event({**frame, "choices": [], "usage": shapes.usage(total)})
    yield DONE


def _echo(service: Service, request: GenerateRequest, first: RequestOutput, body: CompletionRequest) -> dict[str, Any]:
    assert not isinstance(request.prompt, str)
    logprobs = None
    if body.logprobs is not None:
        logprobs = shapes.completion_logprobs(
            service.tokenizer, first.prompt_logprobs, token_ids=request.prompt, offset=0
        )
    return {"text": service.tokenizer.decode(request.prompt), "logprobs": logprobs, "finish_reason": None}


def _piece(
    service: Service, output: RequestOutput, body: CompletionRequest, *, index: int, offset: int
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None and output.logprobs:
        logprobs = shapes.completion_logprobs(
            service.tokenizer, output.logprobs, token_ids=output.token_ids, offset=offset
        )
    return {
        "index": index,
        "text": output.text,
        "logprobs": logprobs,
        "finish_reason": shapes.finish_reason(output.finish_reason, called=False),
        "stop_reason": output.matched_stop if isinstance(output.matched_stop, str) else None,
        **({"reason": output.reason} if output.reason else {}),
    }


def _usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Of the completions of one prompt; the prompt counts once."""
    if not outputs:
        return Usage()
    total = Usage()
    for output in outputs:
        total = total + output.usage
    first = outputs[0].usage
    return Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=min(o.usage.cached_tokens for o in outputs),
        completion_tokens=total.completion_tokens,
        forced_tokens=total.forced_tokens,
        draft_tokens=total.draft_tokens,
        accepted_draft_tokens=total.accepted_draft_tokens,
    )
