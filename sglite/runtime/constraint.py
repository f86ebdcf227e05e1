"""The matcher of each completion: what its grammar, a cut last prompt token and a thinking phase ask together."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from typing import Protocol

from sglite.errors import InvalidRequest
from sglite.grammar.matcher import BatchFiller, CompiledGrammar, Matcher
from sglite.protocol import GenerateRequest, GrammarSpec
from sglite.runtime.request import Job, Request
from sglite.runtime.scheduler.delayed import DelayedMatcher
from sglite.text.detokenizer import Detokenizer
from sglite.text.types import TextTokenizer


class GrammarService(Protocol):
    """What the engine asks of the grammar side. `sglite.grammar` provides it; tests use a fake."""

    @property
    def filler(self) -> BatchFiller: ...

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Never blocks. The future may be done already (cached). It fails with an error of errors.py; any other
        exception ends the one request too."""
        ...

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        """A matcher whose next tokens must continue the bytes of `token_id` and then follow `inner` (None: free).
        None where no longer token begins with those bytes or the token is special: nothing to heal."""
        ...


class BudgetedGrammar(Protocol):
    """A compiled grammar that can steer towards its shortest end."""

    def matcher(self, *, budget: int | None = None) -> Matcher:
        """`budget`: the output, stop id not counted, is complete within that many tokens.
        Raises InvalidRequest where the shortest one is longer."""
        ...


def constrain(
    job: Job, grammar: CompiledGrammar | None, grammars: GrammarService | None, tokenizer: TextTokenizer
) -> None:
    """Set grammar and matcher of each of the job's completions; a healed prompt loses its last token."""
    first = job.requests[0]
    source = job.source
    assert isinstance(source, GenerateRequest)
    matcher = None if grammar is None else _matcher(grammar, source, first)
    if source.grammar_after:
        marker, stop_ids = source.grammar_after, tokenizer.stop_token_ids
        matcher = DelayedMatcher(matcher, marker, budget=source.think_budget, stop_ids=stop_ids)
    healed = _healed(first, matcher, grammars, tokenizer) if source.heal else None
    for request in job.requests:
        request.grammar = grammar
        own = healed[0] if healed is not None else matcher
        request.matcher = own if own is None or request is first else own.fork()
        if healed is not None:
            _drop_last_prompt_token(request, healed[1], tokenizer)


def _matcher(grammar: CompiledGrammar, source: GenerateRequest, request: Request) -> Matcher:
    if not source.close_on_budget:
        return grammar.matcher()
    if "budget" not in inspect.signature(grammar.matcher).parameters:
        raise InvalidRequest(
            f"close_on_budget is not available for this {grammar.spec.kind} grammar", param="close_on_budget"
        )
    budgeted: BudgetedGrammar = grammar  # type: ignore[assignment]
    return budgeted.matcher(budget=request.limit - request.num_prompt)


def _healed(
    request: Request, inner: Matcher | None, grammars: GrammarService | None, tokenizer: TextTokenizer
) -> tuple[Matcher, str] | None:
    """(matcher, text of the last prompt token); None where there is nothing to heal."""
    if request.num_prompt < 2 or not request.samples or request.targets is not None or grammars is None:
        return None
    token_id = int(request.ids[request.num_prompt - 1])
    try:
        text = tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:  # a part of a character: the model sees it is cut, as it did in training
        return None
    matcher = grammars.heal(token_id, inner) if text else None
    return None if matcher is None else (matcher, text)


def _drop_last_prompt_token(request: Request, text: str, tokenizer: TextTokenizer) -> None:
    """The limit stays where it was: a first token that only spells the dropped one again is none of max_tokens."""
    request.num_prompt -= 1
    request.num_tokens -= 1
    source, completion = request.job.source, request.completion
    assert completion is not None
    assert isinstance(source, GenerateRequest)
    completion.healed_token = int(request.ids[request.num_prompt])
    completion.healed_length = completion.skip_text = len(text)
    params = source.sampling_params
    context = request.ids[max(0, request.num_prompt - 8) : request.num_prompt].tolist()
    completion.detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, context=context)
