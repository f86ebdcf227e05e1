"""Operations of a program as requests to a client, and the client's outputs as what a program sees.

The names in the meta info are SGLang's: `output_token_logprobs` and the others hold (log-probability, token id, text)
tuples, and `usage` is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from sglite.lang.branch import Branch
from sglite.lang.choices import Evidence
from sglite.lang.client import holds_rows
from sglite.lang.nodes import Gen, GenParams, Select
from sglite.lang.outlook import Outlook, Place
from sglite.lang.session import Session
from sglite.lang.transcript import Prompt
from sglite.protocol import (
    FinishReason,
    GenerateRequest,
    ProgramRef,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from sglite.text.types import TextTokenizer

DEFAULT_MAX_TOKENS = 128
Speak = Callable[[int], str]
R = TypeVar("R", GenerateRequest, ScoreRequest)


@lru_cache(maxsize=1024)
def resolved(said: GenParams, defaults: GenParams) -> tuple[GenParams, SamplingParams]:
    """What holds for a gen that says `said` in a run with `defaults`, in both forms."""
    params = said.over(defaults).over(GenParams(max_tokens=DEFAULT_MAX_TOKENS))
    return params, params.sampling_params()


def program_ref(session: Session, outlook: Outlook, *, parent: str | None, siblings: int = 1) -> ProgramRef:
    """`wanted_again` is all or nothing: which tokens a later call begins with is known only by then."""
    return ProgramRef(
        program_id=session.program_id,
        parent=parent,
        arrival=session.arrival,
        remaining=outlook.remaining,
        siblings=siblings,
        wanted_again=-1 if outlook.read_again else 0,
    )


@dataclass(frozen=True, slots=True)
class Following:
    """A call that is sent while the one that it goes on from, its leader, runs."""

    leader_id: str
    place: Place
    outlook: Outlook
    siblings: int
    guessed: bool = False  # the program has not said so

    def request_id(self, session: Session) -> str:
        """A guessed one has an id of its own: the program may make another call at that place."""
        return session.request_id(self.place) + "g" * self.guessed


def generate_request(
    branch: Branch, gen: Gen, prompt: Prompt, params: SamplingParams, *, leads: bool
) -> GenerateRequest:
    """`leads`: calls behind it may be sent while it runs."""
    session, outlook = branch.session, branch.outlook(gen.name)
    row, keep = (None, 0) if params.n > 1 else _row(branch, prompt)
    return GenerateRequest(
        request_id=session.request_id(branch.place),
        prompt=prompt.content[keep:],
        continue_from=row,
        keep=keep if row else None,
        hold=_holds(session, outlook, params, leads=leads),
        sampling_params=params,
        grammar=gen.grammar,
        heal=prompt.heal,
        close_on_budget=gen.close_on_budget,
        stream=session.stream,
        program=program_ref(session, outlook, parent=branch.last_request_id, siblings=branch.siblings),
    )


def following_generation(
    session: Session, call: Following, gen: Gen, prompt: Prompt, params: SamplingParams, *, leads: bool
) -> GenerateRequest:
    """`prompt`: what comes behind the leader's tokens."""
    return GenerateRequest(
        request_id=call.request_id(session),
        prompt=prompt.content,
        continue_from=call.leader_id,
        hold=_holds(session, call.outlook, params, leads=leads),
        sampling_params=params,
        grammar=gen.grammar,
        heal=prompt.heal,
        close_on_budget=gen.close_on_budget,
        stream=False,
        program=program_ref(session, call.outlook, parent=call.leader_id, siblings=call.siblings),
    )


def _holds(session: Session, outlook: Outlook, params: SamplingParams, *, leads: bool) -> bool:
    wanted = outlook.goes_on or (leads and outlook.read_again)
    return wanted and params.n == 1 and params.max_tokens != 0 and holds_rows(session.client)


def _row(branch: Branch, prompt: Prompt) -> tuple[str | None, int]:
    """The held row that the prompt goes on from, and how many of its tokens stay: where a stop text cut the answer, or
    text merged with its end, some do not."""
    held = branch.held
    keep = 0 if held is None or isinstance(prompt.content, str) else held.shared(prompt.content)
    return (held.request_id, keep) if held is not None and keep else (None, 0)


def whole_request(request: R, prompt: Prompt) -> R:
    """The same without a row to continue."""
    return msgspec.structs.replace(
        request, request_id=f"{request.request_id}w", prompt=prompt.content, continue_from=None, keep=None
    )


def score_request(
    branch: Branch, prompt: Prompt, options: tuple[tuple[int, ...], ...], name: str | None = None
) -> ScoreRequest:
    outlook = branch.outlook(name)
    row, keep = _row(branch, prompt)
    return ScoreRequest(
        request_id=branch.session.request_id(branch.place),
        prompt=prompt.content[keep:],
        continuations=options,
        continue_from=row,
        keep=keep if row else None,
        hold=outlook.goes_on and holds_rows(branch.session.client),
        program=program_ref(branch.session, outlook, parent=branch.last_request_id, siblings=branch.siblings),
    )


def following_score(
    session: Session, call: Following, prompt: Prompt, options: tuple[tuple[int, ...], ...]
) -> ScoreRequest:
    """`prompt`: what comes behind the leader's tokens."""
    return ScoreRequest(
        request_id=call.request_id(session),
        prompt=prompt.content,
        continuations=options,
        continue_from=call.leader_id,
        hold=call.outlook.goes_on and holds_rows(session.client),
        program=program_ref(session, call.outlook, parent=call.leader_id, siblings=call.siblings),
    )


def unconditional_requests(branch: Branch, options: tuple[tuple[int, ...], ...]) -> list[ScoreRequest | None]:
    """Each option after its own first token alone; None for an option of one token, which has nothing to score."""
    return [
        ScoreRequest(
            request_id=f"{branch.session.request_id(branch.place)}:{number}",
            prompt=option[:1],
            continuations=(option[1:],),
            program=program_ref(
                branch.session,
                Outlook(None, 0, False, False),
                parent=branch.last_request_id,
                siblings=branch.siblings,
            ),
        )
        if len(option) > 1
        else None
        for number, option in enumerate(options)
    ]


def unconditional_row(output: ScoreOutput | None) -> tuple[float, ...]:
    """The first token counts nothing: there is no probability of it without a prompt."""
    return (0.0, *(output.logprobs[0] if output is not None else ()))


def gen_meta(
    request: GenerateRequest, output: RequestOutput, params: GenParams, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """The meta info of one completion (or of one piece of it, in a stream)."""
    meta: dict[str, Any] = {
        "id": request.request_id,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "finish_reason": _finish(output),
        "usage": output.usage,
        "coverage": output.coverage,
        "timing": output.timing,
    }
    if output.logprobs:
        speak = _speaker(tokenizer) if params.return_text_in_logprobs else None
        meta["output_token_logprobs"] = [_triple(p.logprob, p.token_id, speak) for p in output.logprobs]
        if params.top_logprobs_num:
            meta["output_top_logprobs"] = [_tops(p, speak) for p in output.logprobs]
    if output.prompt_logprobs:
        speak = _speaker(tokenizer) if params.return_text_in_logprobs else None
        ids = output.prompt_token_ids
        start = params.logprob_start_len or 0
        rows = list(enumerate(output.prompt_logprobs))[start:]
        meta["input_token_logprobs"] = [
            _triple(p.logprob, p.token_id, speak) if p else (None, ids[i] if i < len(ids) else None, None)
            for i, p in rows
        ]
        if params.top_logprobs_num:
            meta["input_top_logprobs"] = [_tops(p, speak) if p else None for _, p in rows]
    return meta


def select_meta(
    select: Select,
    evidence: Evidence,
    options: tuple[tuple[int, ...], ...],
    probabilities: list[float],
    usage: Usage,
    speak: Speak,
) -> dict[str, Any]:
    """`speak`: a token's text."""

    def rows(logprobs: Any) -> list[list[tuple[float | None, int, str | None]]]:
        return [
            [(value, token_id, speak(token_id)) for value, token_id in zip(row, option, strict=True)]
            for row, option in zip(logprobs, options, strict=True)
        ]

    meta: dict[str, Any] = {
        "normalized_prompt_logprobs": [sum(row) / len(row) if row else 0.0 for row in evidence.conditional],
        "input_token_logprobs": rows(evidence.conditional),
        "probabilities": dict(zip(select.choices, probabilities, strict=True)),
        "scores": select.method.scores(evidence),
        "method": select.method.name,
        "usage": usage,
    }
    if evidence.unconditional is not None:
        meta["unconditional_token_logprobs"] = rows(evidence.unconditional)
        meta["normalized_unconditional_prompt_logprobs"] = meta["scores"]
    return meta


def total_usage(outputs: list[RequestOutput]) -> Usage:
    """Of the completions of one request: the prompt counts once."""
    first, *others = [output.usage for output in outputs]
    for usage in others:
        first = Usage(
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            completion_tokens=first.completion_tokens + usage.completion_tokens,
            forced_tokens=first.forced_tokens + usage.forced_tokens,
            draft_tokens=first.draft_tokens + usage.draft_tokens,
            accepted_draft_tokens=first.accepted_draft_tokens + usage.accepted_draft_tokens,
        )
    return first


def _finish(output: RequestOutput) -> dict[str, Any] | None:
    if output.finish_reason is None:
        return None
    found: dict[str, Any] = {"type": output.finish_reason.value}
    if output.matched_stop is not None:
        found["matched"] = output.matched_stop
    if output.finish_reason is FinishReason.LENGTH:
        found["length"] = output.usage.completion_tokens
    if output.reason:
        found["reason"] = output.reason
    return found


def _speaker(tokenizer: TextTokenizer | None) -> Speak | None:
    return None if tokenizer is None else lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _triple(logprob: float | None, token_id: int, speak: Speak | None) -> tuple[Any, int, str | None]:
    return (logprob, token_id, None if speak is None else speak(token_id))


def _tops(logprob: TokenLogprob, speak: Speak | None) -> list[tuple[Any, int, str | None]]:
    return [_triple(value, token_id, speak) for token_id, value in logprob.top]
