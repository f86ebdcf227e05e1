"""What the result of a step means for each request: append, advance the matcher, stop, finish, emit.

The order for one token, which decides what a token that is several things at once counts as:

    1. a stop id ends the output (under a grammar only where that is complete); it is no part of the text
    2. the matcher takes it; refused: the request ends with an error, its neighbours go on
    3. the text grows; a stop text or regex ends the output
    4. the grammar allows nothing more: the output is over
    5. max_tokens or the context's end
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from sglite.errors import GrammarViolation, InvalidRequest, RequestAborted, SgliteError
from sglite.grammar.matcher import OVER, REFUSED, BatchAdvancer, Matcher
from sglite.protocol import (
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
)
from sglite.runtime.batch import IntArray, StepResult
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import FINISH_REASONS, Moment, Request, RequestStatus
from sglite.runtime.scheduler.answers import (
    completion_output,
    keep_logprobs,
    keep_targets,
    score_output,
    usage_of,
    warming_output,
)
from sglite.runtime.scheduler.delayed import DelayedMatcher
from sglite.runtime.scheduler.jumps import JumpPolicy
from sglite.runtime.scheduler.odds import RunOdds
from sglite.runtime.scheduler.rows import MATCHER, STREAMS, RowTable, Step
from sglite.runtime.scheduler.runs import Runs
from sglite.runtime.scheduler.scheduler import Scheduler
from sglite.runtime.stop import StopRegexTimeout
from sglite.text.types import TextTokenizer

_log = logging.getLogger(__name__)

Output = RequestOutput | ScoreOutput


class OutputProcessor:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: RowTable,
        tokenizer: TextTokenizer,
        metrics: Metrics,
        vocab_size: int,
        advancer: BatchAdvancer | None,
        jumps: JumpPolicy,
        odds: RunOdds,
        clock: Callable[[], float],
    ) -> None:
        """`vocab_size`: ids that a sampler can draw. `advancer`: accepts the tokens of many matchers at once."""
        self._advancer = advancer
        self._jumps = jumps
        self._odds = odds
        self._jumping: set[int] = set()  # rows of the step being applied whose forced text enters at once
        self._is_stop = np.zeros(vocab_size, np.bool_)
        self._is_stop[list(tokenizer.stop_token_ids)] = True
        self._scheduler = scheduler
        self._table = table
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._runs = Runs(table, metrics, lambda request: self._emit(request))
        self._guessed: list[int] = []  # batch indices of the step being applied: their token and its text are stored
        self._outbox: list[Output] = []
        self._jobs_over: list[str] = []

    # -- what comes out

    @property
    def has_output(self) -> bool:
        return bool(self._outbox)

    def take(self) -> list[Output]:
        out, self._outbox = self._outbox, []
        return out

    def take_jobs_over(self) -> list[str]:
        over, self._jobs_over = self._jobs_over, []
        return over

    # -- the result of a step

    def apply(self, step: Step, result: StepResult, following: Step | None = None) -> None:
        """`following` is on the device behind it."""
        self._jumping.clear()
        self._guessed = []
        others, accepted = self._take_plain(step, result, following)
        for i in others:
            self._take_drawn(step, result, i, accepted.get(i), following)
        for i in step.targets:
            request = step.requests[i]
            if not request.finished and request not in step.dropped:
                keep_targets(step, result, i)
        for i in step.ended:
            request = step.requests[i]
            if not request.finished and request not in step.dropped:
                self.finish(request, RequestStatus.LENGTH)

    def _take_plain(self, step: Step, result: StepResult, following: Step | None) -> tuple[list[int], dict[int, bool]]:
        """All rows at once whose token only has to be stored, and sent where they stream. Returns the batch indices
        of the other rows that sampled or failed, and what the matchers of some of those said to the token."""
        batch, table = step.batch, self._table
        tokens = result.tokens[:, 0]
        plain, flags, some_flags = table.plain_draws(step, tokens, self._is_stop)
        if result.tokens.shape[1] > 1:
            plain &= batch.num_drafts == 0
        if result.errors:
            plain[list(result.errors)] = False
        if step.late:
            plain[step.late] = False
        accepted: dict[int, bool] = {}
        if some_flags & MATCHER:
            bound = (plain & ((flags & MATCHER) != 0)).nonzero()[0].tolist()
            if bound or (following is not None and following.guesses):
                accepted = self._advance(step, tokens, bound, following)
                plain[list(accepted)] = False
        others = batch.samples & ~plain
        if self._guessed:
            others[self._guessed] = False
        if self._jumping:
            others[self._runs.enter(step, tokens, self._jumping)] = False
        if result.errors:
            others[list(result.errors)] = True
        if step.late:
            others[step.late] = False
        chosen = plain.nonzero()[0]
        if len(chosen) == len(plain):
            table.advance(batch.rows, tokens)
        elif len(chosen):
            table.advance(batch.rows[chosen], tokens[chosen])
        self._metrics.completion_tokens += len(chosen)
        if some_flags & STREAMS:
            for i in (plain & ((flags & STREAMS) != 0)).nonzero()[0].tolist():
                self._stream(step.requests[i], int(tokens[i]))
        return others.nonzero()[0].tolist(), accepted

    def _advance(self, step: Step, tokens: IntArray, indices: list[int], following: Step | None) -> dict[int, bool]:
        """Show each row's token to its matcher, all in native threads where the grammar side can. Returns the rows
        for which there is more to do: refused (False), or the output's end or forced text follows (True)."""
        requests = step.requests if len(indices) == len(step.requests) else [step.requests[i] for i in indices]
        token_ids = tokens[indices].tolist()
        more: dict[int, bool] = {}
        places = self._odds.places(request.matcher for request in requests)
        if self._advancer is not None:
            try:
                verdicts = self._advancer.advance([r.matcher for r in requests], token_ids)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - which of them have moved is unknown: these requests end
                for request in requests:
                    self.fail(request, _request_error(error))
                if following is not None:
                    self._runs.settle_guesses(step, tokens, (), (), following)
                return dict.fromkeys(indices, False)
        else:
            verdicts = [self._accepts(r, token_id) for r, token_id in zip(requests, token_ids, strict=True)]
        self._odds.drew(places, verdicts, requests)
        if following is not None and following.guesses:
            self._guessed = self._runs.settle_guesses(step, tokens, indices, verdicts, following)
            more.update(dict.fromkeys(self._guessed, True))
        return self._look_ahead(step, indices, requests, verdicts, more)

    def _look_ahead(
        self, step: Step, indices: list[int], requests: list[Request], verdicts: Sequence[int], more: dict[int, bool]
    ) -> dict[int, bool]:
        """What `_advance` returns: `more` has the rows that are settled."""
        saved: dict[int, int] = {}
        if any(verdicts):
            drawing = (self._table.in_flight[step.batch.rows] > 1).tolist()  # the next draw is under way
            for k, ahead in enumerate(verdicts):
                i, request = indices[k], requests[k]
                if not ahead or i in more:
                    continue
                if ahead < 0 or request.finished:
                    more[i] = ahead == OVER and not request.finished
                elif request.completion is not None and request.completion.jump_forward:
                    if ahead > drawing[i]:
                        saved[i] = ahead - drawing[i]
                    else:
                        self._runs.count_forced(request, 1)
        free = len(requests) < len(step.requests) and any(request.matcher is None for request in step.requests)
        if self._jumps.pays(saved, len(step.requests), free=free):
            self._jumping.update(saved)
            more.update(dict.fromkeys(saved, True))
        else:
            for i in saved:
                self._runs.count_forced(step.requests[i], 1)
        return more

    def _accepts(self, request: Request, token_id: int) -> int:
        """What a BatchAdvancer says of one matcher."""
        matcher = request.matcher
        assert matcher is not None
        try:
            if matcher.accept((token_id,)) != 1:
                return REFUSED
            return OVER if matcher.finished else len(matcher.forced())
        except Exception as error:  # noqa: BLE001 - a grammar engine may raise anything; it ends its own request
            self.fail(request, _request_error(error))
            return REFUSED

    def _take_drawn(
        self, step: Step, result: StepResult, i: int, accepted: bool | None, following: Step | None
    ) -> None:
        """What row i of the batch drew, whatever has become of its request. `accepted`: what its matcher said to the
        token already."""
        request, batch = step.requests[i], step.batch
        if request.finished or request in step.dropped:
            self._metrics.stale_tokens += 1
            return
        if i in result.errors:
            self.fail(request, SgliteError(f"sampling failed: {result.errors[i]}"))
            return
        count = int(result.num_accepted[i])
        drawn = result.tokens[i, :count].tolist()
        if request.num_ahead:
            request.num_ahead -= 1
            self._check_forced(request, int(batch.output_index[i]), drawn[0])
            if request.status is RequestStatus.RUNNING:
                self._table.settle(request)
                self._table.sync(request)  # its next token may be like any other
            return
        if i in result.chosen_logprobs:
            keep_logprobs(request, result, i, count)
        if request.status is RequestStatus.RUNNING:
            self._table.confirm(request)
            self._table.in_flight[request.row] -= 1
            drafts = int(batch.num_drafts[i])
            if i in step.assumed:
                self._count_drafts(request, drafts, count - 1)
                if count <= drafts and self._table.rewind(request) and following is not None:
                    following.dropped.add(request)
            elif drafts:
                self._count_drafts(request, drafts, count - 1)
                self._table.computed[request.row] -= drafts - (count - 1)
        jump = request.matcher is not None and (
            i in self._jumping
            or (accepted is None and (bool(self._jumping) or self._jumps.pays({i: 1}, len(step.requests))))
        )
        self._take_tokens(request, drawn, accepted=accepted, jump=jump)

    def start(self, request: Request) -> None:
        """The matcher of a request is ready: what it forces from the start joins the prompt's computation."""
        if request.completion is not None and request.completion.jump_forward and request.matcher is not None:
            self._take_tokens(request, [], jump=True)

    # -- tokens

    def _stream(self, request: Request, token_id: int) -> None:
        """Send one token of a plain row."""
        completion = request.completion
        assert completion is not None
        request.num_tokens += 1
        completion.num_sent += 1
        self._outbox.append(
            RequestOutput(
                request_id=request.job.request_id,
                index=request.index,
                text=completion.plain_text(token_id),
                token_ids=(token_id,),
                usage=usage_of(request),
            )
        )

    def _take_tokens(self, request: Request, token_ids: list[int], *, jump: bool, accepted: bool | None = None) -> None:
        """Append sampled tokens and, with `jump`, what the grammar forces after them; send them or end the request."""
        completion = request.completion
        assert completion is not None
        status = error = None
        before = request.num_output
        try:
            for token_id in token_ids:
                status = self._append(request, token_id, accepted=accepted)
                if status is not None:
                    break
            if status is None and request.matcher is not None:
                unwrapped: Matcher | None = getattr(request.matcher, "unwrapped", None)
                request.matcher = unwrapped or request.matcher
                if completion.jump_forward:
                    status = self._append_forced(request) if jump else self._draw_forced(request)
                if request.grammar is None and request.matcher.can_stop:
                    request.matcher = None  # a healed token or a bounded thinking phase has no more to say
        except Exception as caught:  # noqa: BLE001 - a grammar engine may raise anything; it ends its own request
            error = _request_error(caught)
        if request.status is RequestStatus.RUNNING:
            self._update_row(request, forced=request.num_output > before + len(token_ids))
        if error is not None:
            self.fail(request, error)
        elif status is not None:
            self.finish(request, status)
        elif completion.stream and completion.num_sent < request.num_output:
            self._emit(request)

    def _update_row(self, request: Request, *, forced: bool) -> None:
        """Tell the row of its new tokens. Where text was forced and a sample is under way already, that token is
        known: it is the first forced one, and its result will be dropped."""
        row = request.row
        if forced and self._table.in_flight[row]:
            self._table.in_flight[row] = 0
            request.num_ahead += 1
        self._table.sync(request)

    def _append(self, request: Request, token_id: int, *, accepted: bool | None) -> RequestStatus | None:
        """One sampled token; the status that it ends the request with."""
        completion = request.completion
        assert completion is not None
        request.append(token_id)
        self._metrics.completion_tokens += 1
        if completion.healed_token >= 0 and request.num_output == 1:
            self._scheduler.heals.saw(again=token_id == completion.healed_token)
            source = request.job.source
            if token_id == completion.healed_token:
                pass
            elif isinstance(source, GenerateRequest) and source.sampling_params.max_tokens is not None:
                request.limit -= 1  # it says more than the prompt did, so it counts
                request.end = request.limit - 1
        matcher = request.matcher
        stops = token_id in completion.stop_ids
        if matcher is None:
            stops = stops and request.num_output > completion.min_tokens
        elif stops and token_id in completion.extra_stop_ids and matcher.can_stop:
            pass  # the request's own stop id is no part of the grammar's text
        else:
            if accepted is None:
                accepted = matcher.accept((token_id,)) == 1
            if not accepted:
                raise GrammarViolation(
                    f"the sampled token {token_id} does not continue the output under its grammar; this is an engine"
                    " error"
                )
            stops = stops and token_id not in completion.extra_stop_ids
        if stops:
            completion.matched_stop = token_id
            completion.stop_id_hidden = not completion.include_stop
            return RequestStatus.STOPPED
        if completion.stops is not None:
            match = completion.read([token_id], request.num_output)
            if match is not None:
                completion.matched_stop = match.spec
                return RequestStatus.STOPPED
        if matcher is not None and matcher.finished:
            return RequestStatus.GRAMMAR_END
        return RequestStatus.LENGTH if request.num_tokens >= request.limit else None

    def _draw_forced(self, request: Request) -> None:
        """The next token will be a forced one, under its mask."""
        if request.matcher is not None and request.matcher.forced():
            self._runs.count_forced(request, 1)

    def _append_forced(self, request: Request) -> RequestStatus | None:
        completion, matcher = request.completion, request.matcher
        assert completion is not None
        assert matcher is not None
        run = matcher.forced()[: request.limit - request.num_tokens]
        if not run:
            return None
        if matcher.accept(run) != len(run):
            raise GrammarViolation("a forced text was refused by its own grammar; this is an engine error")
        self._runs.count_forced(request, len(run))
        self._metrics.completion_tokens += len(run)
        for token_id in run:
            request.append(token_id)
            if completion.stops is not None:
                match = completion.read([token_id], request.num_output)
                if match is not None:
                    completion.matched_stop = match.spec
                    return RequestStatus.STOPPED
        if matcher.finished:
            return RequestStatus.GRAMMAR_END
        return RequestStatus.LENGTH if request.num_tokens >= request.limit else None

    def _check_forced(self, request: Request, output_index: int, token_id: int) -> None:
        expected = int(request.ids[request.num_prompt + int(output_index)])
        if token_id != expected:
            self.fail(request, GrammarViolation(f"token {expected} was forced and {token_id} was drawn"))

    def _count_drafts(self, request: Request, drafts: int, accepted: int) -> None:
        assert request.completion is not None
        request.completion.draft_tokens += drafts
        request.completion.accepted_draft_tokens += accepted
        self._metrics.draft_tokens += drafts
        self._metrics.accepted_draft_tokens += accepted

    # -- ends

    def fail(self, request: Request, error: BaseException) -> None:
        self._metrics.failed += 1
        self.finish(request, RequestStatus.FAILED, error=error)

    def abort(self, request: Request, reason: str) -> None:
        self._metrics.aborted += 1
        self.finish(request, RequestStatus.ABORTED, error=RequestAborted(reason), reason=reason)

    def refuse(self, source: GenerateRequest | ScoreRequest, error: SgliteError) -> None:
        """A request that was taken and has not begun ends without having run."""
        told = ErrorInfo.of(error)
        if isinstance(source, ScoreRequest):
            self._outbox.append(ScoreOutput(request_id=source.request_id, error=told))
            return
        for index in range(source.sampling_params.n):
            aborted = isinstance(error, RequestAborted)
            reason = FinishReason.ABORT if aborted else FinishReason.ERROR
            self._outbox.append(
                RequestOutput(
                    request_id=source.request_id, index=index, finish_reason=reason, reason=str(error), error=told
                )
            )

    def finish(
        self, request: Request, status: RequestStatus, *, error: BaseException | None = None, reason: str = ""
    ) -> None:
        """The end of one request: its row and pages are given back, its last output goes out."""
        if request.finished:
            return
        status, reason = self._validated(request, status, reason)
        source = request.job.source
        well = status < RequestStatus.ABORTED
        hold = source is not None and source.hold and well and (request.completion is not None or request.index == 0)
        self._scheduler.remove(request, keep=status is not RequestStatus.FAILED, hold=hold)
        request.status = status
        if hold:
            self._hold(request)
        self._metrics.count_finish(FINISH_REASONS[status].value)
        job = request.job
        job.num_open -= 1
        if request.completion is not None:
            self._emit(request, reason=reason, error=error)
        elif job.trie is not None:
            self._finish_scoring(request, error)
        else:
            self._outbox.append(warming_output(request, error))
        if job.num_open == 0:
            self._jobs_over.append(job.request_id)

    def _validated(self, request: Request, status: RequestStatus, reason: str) -> tuple[RequestStatus, str]:
        """A complete output is held against what its mask could not enforce."""
        grammar, completion = request.grammar, request.completion
        if grammar is None or completion is None or grammar.coverage.exact:
            return status, reason
        whole = status is RequestStatus.GRAMMAR_END or (
            status is RequestStatus.STOPPED and isinstance(completion.matched_stop, int)
        )
        if not whole:
            return status, reason
        first = request.num_prompt
        if isinstance(request.matcher, DelayedMatcher):
            first += request.matcher.num_free
        ids = request.ids[first : request.num_tokens - completion.stop_id_hidden].tolist()
        text = self._tokenizer.decode(ids)
        if first == request.num_prompt:
            text = text[completion.healed_length :]
        try:
            why = grammar.validate(text)
        except Exception as error:  # noqa: BLE001 - a validator that fails has validated nothing
            _log.error("a validator failed", exc_info=error)
            why = f"could not be validated: {type(error).__name__}: {error}"
        return (status, reason) if why is None else (RequestStatus.SCHEMA_VIOLATION, why)

    def _hold(self, request: Request) -> None:
        """What the client has: prompt and output, of a scoring its prompt."""
        completion = request.completion
        if completion is None:
            length = request.job.num_prompt
        else:
            length = request.num_tokens - completion.stop_id_hidden
        self._scheduler.held.hold(request, request.ids[:length])

    def _finish_scoring(self, request: Request, error: BaseException | None) -> None:
        job = request.job
        if error is not None:
            for other in job.requests:  # one row less makes the whole of no use
                if not other.finished:
                    self._scheduler.remove(other)
                    other.status = request.status
            job.num_open = 0
            self._outbox.append(ScoreOutput(request_id=job.request_id, error=ErrorInfo.of(error)))
        elif job.num_open == 0:
            assert job.trie is not None
            self._outbox.append(score_output(job, self._now()))

    def _now(self) -> Moment:
        return Moment(self._clock(), self._metrics.steps, self._metrics.step_s)

    # -- outputs

    def _emit(self, request: Request, *, reason: str = "", error: BaseException | None = None) -> None:
        """Send what is new. The last one (the request is finished) flushes the text."""
        completion = request.completion
        assert completion is not None
        over = request.finished
        first = request.num_prompt + completion.num_sent
        new_ids = request.ids[first : request.num_tokens - (over and completion.stop_id_hidden)].tolist()
        if completion.stops is None:
            completion.read(new_ids, request.num_output)
        if over and not isinstance(completion.matched_stop, str):
            completion.finish_text()
        completion.num_sent += len(new_ids)
        if over and completion.stop_id_hidden:
            del completion.logprobs[len(new_ids) :]
        now = self._now() if over else None
        self._outbox.append(completion_output(request, new_ids, now, reason=reason, error=error))
        completion.began = True
        completion.text = ""
        completion.logprobs = []


def _request_error(error: Exception) -> SgliteError:
    if isinstance(error, SgliteError):
        return error
    if isinstance(error, StopRegexTimeout):
        return InvalidRequest(
            f"stop_regex {str(error)!r} took too long to search; make it simpler or use stop texts",
            param="stop_regex",
        )
    _log.error("a request's matcher failed", exc_info=error)
    return GrammarViolation(f"the grammar engine failed: {type(error).__name__}: {error}")
