"""From a request's state to the values that a client gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglite.protocol import ErrorInfo, RequestOutput, ScoreOutput, Timing, TokenLogprob, Usage
from sglite.runtime.batch import IntArray, StepResult
from sglite.runtime.request import FINISH_REASONS, Job, Moment, Request
from sglite.runtime.scheduler.rows import Step

_LEAST_LOGPROB = -9999.0  # of a token that cannot come: JSON has no infinity


def completion_output(
    request: Request, new_ids: list[int], now: Moment | None, *, reason: str = "", error: BaseException | None = None
) -> RequestOutput:
    """What the client has not got yet: these ids, the completion's text and log-probabilities. `now`: of the last
    output, which tells where the time went."""
    completion = request.completion
    assert completion is not None
    over, first = request.finished, not completion.began
    return RequestOutput(
        request_id=request.job.request_id,
        index=request.index,
        text=completion.text,
        token_ids=tuple(new_ids),
        finish_reason=FINISH_REASONS[request.status] if over else None,
        matched_stop=completion.matched_stop,
        logprobs=tuple(completion.logprobs),
        prompt_logprobs=_prompt_logprobs(request) if first else (),
        prompt_token_ids=_prompt_ids(request) if first else (),
        usage=usage_of(request),
        coverage=request.grammar.coverage if over and request.grammar is not None else None,
        reason=reason,
        timing=None if now is None else _timing(request, now),
        error=None if error is None else ErrorInfo.of(error),
    )


def _prompt_ids(request: Request) -> tuple[int, ...]:
    """What was read before the first token. As given where nothing was added to it or taken away: for 64 answers to
    8,192 ids each that end in one step, making these anew would hold all other rows for 17 ms."""
    source = request.job.source
    if source is not None and source.continue_from is None:
        given = source.prompt  # healing and truncation only take away
        if isinstance(given, tuple) and len(given) == request.num_prompt:
            return given
    return tuple(request.ids[: request.num_prompt].tolist())


def score_output(job: Job, now: Moment) -> ScoreOutput:
    """All rows of the job are done."""
    assert job.trie is not None
    logprobs = tuple(tuple(map(_finite, one)) for one in job.trie.logprobs())
    usage = Usage(prompt_tokens=job.num_prompt, cached_tokens=job.cached_tokens)
    timing = _timing(job.requests[0], now)
    return ScoreOutput(request_id=job.request_id, logprobs=logprobs, usage=usage, timing=timing)


def warming_output(request: Request, error: BaseException | None) -> RequestOutput:
    job = request.job
    return RequestOutput(
        request_id=job.request_id,
        finish_reason=FINISH_REASONS[request.status],
        usage=Usage(prompt_tokens=request.num_prompt, cached_tokens=job.cached_tokens),
        error=None if error is None else ErrorInfo.of(error),
    )


def _timing(request: Request, now: Moment) -> Timing:
    began, arrived = request.admitted, request.job.arrival
    if began is None:
        return Timing(arrived=arrived, finished=now.at)
    return Timing(
        arrived=arrived,
        admitted=began.at,
        finished=now.at,
        steps=now.steps - began.steps,
        step_s=now.step_s - began.step_s,
    )


def usage_of(request: Request) -> Usage:
    completion = request.completion
    assert completion is not None
    return Usage(
        prompt_tokens=request.num_prompt,
        cached_tokens=completion.cached_tokens,
        completion_tokens=request.num_tokens - request.num_prompt,
        forced_tokens=completion.forced_tokens,
        draft_tokens=completion.draft_tokens,
        accepted_draft_tokens=completion.accepted_draft_tokens,
    )


def keep_logprobs(request: Request, result: StepResult, i: int, count: int) -> None:
    """Row i drew `count` tokens whose log-probabilities were asked for."""
    completion = request.completion
    assert completion is not None
    chosen = result.chosen_logprobs[i]
    masked = result.masked_logprobs.get(i) if request.matcher is not None else None
    top = result.top_logprobs.get(i)
    for j in range(count):
        best = () if top is None else _best(top[0][j], top[1][j], completion.num_logprobs)
        after = None if masked is None else _finite(masked[j])
        completion.logprobs.append(TokenLogprob(int(result.tokens[i, j]), _finite(chosen[j]), best, after))


def keep_targets(step: Step, result: StepResult, i: int) -> None:
    """Row i computed some of the log-probabilities that its request is for."""
    targets = step.requests[i].targets
    assert targets is not None
    lo, hi = step.targets[i]
    targets.logprobs[lo:hi] = result.chosen_logprobs[i]
    targets.num_done = max(targets.num_done, hi)
    if targets.num_top:
        batch = step.batch
        first = int(batch.starts[i] + batch.num_new[i] - batch.num_logits[i])
        ids, logprobs = result.top_logprobs[i]
        for position in targets.positions[lo:hi].tolist():
            at = position - first
            targets.top[position] = ids[at, : targets.num_top], logprobs[at, : targets.num_top]


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    """One entry per prompt token, the first of which has none."""
    targets = request.targets
    if targets is None or targets.num_done < len(targets.positions):
        return ()
    entries: list[TokenLogprob | None] = [None]
    for at, (position, token_id) in enumerate(zip(targets.positions.tolist(), targets.ids.tolist(), strict=True)):
        top = targets.top.get(position)
        best = () if top is None else _best(*top, targets.num_top)
        entries.append(TokenLogprob(token_id, _finite(targets.logprobs[at]), best))
    return tuple(entries)


def _best(ids: IntArray, logprobs: NDArray[np.float32], num: int) -> tuple[tuple[int, float], ...]:
    """The `num` best (id, log-probability) of one position."""
    if num <= 0:
        return ()
    return tuple(zip(ids[:num].tolist(), map(_finite, logprobs[:num]), strict=True))


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)
