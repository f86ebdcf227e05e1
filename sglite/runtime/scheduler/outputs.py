"""What the result of a step means for each request: append, advance the matcher, stop, finish, emit.

The order for one token, which decides what a token that is several things at once counts as:

    1. a stop id ends the output (under a grammar only where that is complete); it is no part of the text
    2. the matcher takes it; refused: the request ends with an error, its neighbours go on
    3. the text grows; a stop text or regex ends the output
    4. the grammar allows nothing more: the output is over
    5. max_tokens or the context's end
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglite.errors import GrammarViolation, InvalidRequest, RequestAborted, SgliteError
from sglite.protocol import (
    ErrorInfo,
    GenerateRequest,
    RequestOutput,
    ScoreOutput,
    TokenLogprob,
    Usage,
)
from sglite.runtime.batch import StepResult
from sglite.runtime.config import EngineConfig
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import FINISH_REASONS, Request, RequestStatus
from sglite.runtime.scheduler.delayed import DelayedMatcher
from sglite.runtime.scheduler.held import HeldRow
from sglite.runtime.scheduler.rows import RowTable, Step
from sglite.runtime.scheduler.scheduler import Scheduler
from sglite.runtime.stop import StopRegexTimeout
from sglite.text.types import TextTokenizer

Output = RequestOutput | ScoreOutput

_LEAST_LOGPROB = -9999.0  # of a token that cannot come: JSON has no infinity


class OutputProcessor:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: RowTable,
        tokenizer: TextTokenizer,
        config: EngineConfig,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._clock = clock
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

    def apply(self, step: Step, result: StepResult) -> None:
        batch = step.batch
        tokens = result.tokens[:, 0].tolist() if result.tokens.shape[1] else []
        samples = batch.samples.tolist()
        counts = result.num_accepted.tolist()
        moved_rows: list[int] = []
        moved_tokens: list[int] = []
        logprob_rows = set(batch.logprob_rows.tolist())
        for i, request in enumerate(step.requests):
            if request.finished or request in step.dropped:
                self._metrics.stale_tokens += int(samples[i])
                continue
            if result.errors and i in result.errors:
                self.fail(request, SgliteError(f"sampling failed: {result.errors[i]}"))
                continue
            if not samples[i]:
                continue
            if request.num_ahead:
                request.num_ahead -= 1
                self._check_forced(request, batch.output_index[i], tokens[i])
                continue
            if i in logprob_rows:
                self._keep_logprobs(request, result, i, counts[i])
            running = request.status is RequestStatus.RUNNING
            new = [tokens[i]] if counts[i] == 1 else result.tokens[i, : counts[i]].tolist()
            if running and batch.num_drafts[i]:
                drafts = int(batch.num_drafts[i])
                self._count_drafts(request, drafts, counts[i] - 1)
                self._table.computed[request.row] -= drafts - (counts[i] - 1)
            if not self._take_tokens(request, new):
                continue
            if running and len(new) == 1 and request.num_tokens == self._table.length[request.row] + 1:
                moved_rows.append(request.row)
                moved_tokens.append(tokens[i])
            elif running:
                self._moved_on(request)
        if moved_rows:
            rows = np.array(moved_rows, np.int32)
            self._table.length[rows] += 1
            self._table.in_flight[rows] -= 1
            self._table.last_token[rows] = moved_tokens
        for i in step.targets:
            self._keep_targets(step, result, i)
        for i in step.ended:
            request = step.requests[i]
            if not request.finished and request not in step.dropped:
                self.finish_computed(request)

    def start(self, request: Request) -> None:
        """The matcher of a request is ready: what it forces from the start joins the prompt's computation."""
        if request.completion is not None and request.completion.jump_forward and request.matcher is not None:
            self._take_tokens(request, [])

    # -- tokens

    def _take_tokens(self, request: Request, token_ids: list[int]) -> bool:
        """Append sampled tokens and what the grammar forces after them; emit. False when the request is over."""
        completion = request.completion
        assert completion is not None
        try:
            status = None
            for token_id in token_ids:
                status = self._append(request, token_id)
                if status is not None:
                    break
            if status is None and request.matcher is not None:
                if completion.jump_forward:
                    status = self._append_forced(request)
                if request.grammar is None and request.matcher.can_stop:
                    self._unbind(request)
        except (GrammarViolation, StopRegexTimeout) as error:
            self.fail(request, _request_error(error))
            return False
        if status is not None:
            self.finish(request, status)
            return False
        if completion.stream and completion.num_sent < request.num_output:
            self._emit(request)
        return True

    def _append(self, request: Request, token_id: int) -> RequestStatus | None:
        """One sampled token; the status that it ends the request with."""
        completion = request.completion
        assert completion is not None
        request.append(token_id)
        self._metrics.completion_tokens += 1
        matcher = request.matcher
        if token_id in completion.stop_ids and (matcher is not None or request.num_output > completion.min_tokens):
            if matcher is None or self._stops_grammar(request, token_id):
                completion.matched_stop = token_id
                completion.stop_id_hidden = not completion.include_stop
                return RequestStatus.STOPPED
        elif matcher is not None and matcher.accept((token_id,)) != 1:
            raise GrammarViolation(
                f"the sampled token {token_id} does not continue the output under its grammar; this is an engine error"
            )
        if completion.stops is not None:
            match = completion.read([token_id], request.num_output)
            if match is not None:
                completion.matched_stop = match.spec
                return RequestStatus.STOPPED
        if matcher is not None and matcher.finished:
            return RequestStatus.GRAMMAR_END
        return RequestStatus.LENGTH if request.num_tokens >= request.limit else None

    @staticmethod
    def _stops_grammar(request: Request, token_id: int) -> bool:
        """A stop id under a grammar: the end where the text is complete, else a request's own id may be text."""
        completion, matcher = request.completion, request.matcher
        assert completion is not None
        assert matcher is not None
        if token_id in completion.extra_stop_ids:
            if matcher.can_stop:
                return True
            if matcher.accept((token_id,)) == 1:
                return False
        elif matcher.accept((token_id,)) == 1:
            return True
        raise GrammarViolation(
            f"the stop token {token_id} came before the output was complete; this is an engine error"
        )

    def _append_forced(self, request: Request) -> RequestStatus | None:
        completion, matcher = request.completion, request.matcher
        assert completion is not None
        assert matcher is not None
        while run := matcher.forced():
            run = run[: request.limit - request.num_tokens]
            if matcher.accept(run) != len(run):
                raise GrammarViolation("a forced text was refused by its own grammar; this is an engine error")
            completion.forced_tokens += len(run)
            self._metrics.forced_tokens += len(run)
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
            if request.num_tokens >= request.limit:
                return RequestStatus.LENGTH
        return None

    def _unbind(self, request: Request) -> None:
        """A matcher without a grammar (a healed token, a bounded thinking phase) has nothing more to say."""
        request.matcher = None
        if request.status is RequestStatus.RUNNING:
            self._table.constrain(request)

    def _moved_on(self, request: Request) -> None:
        """A row took more than one token. If its next sample is under way already, that token is known: it was the
        first forced one, and its result is dropped."""
        row = request.row
        self._table.in_flight[row] -= 1
        if self._table.in_flight[row]:
            self._table.in_flight[row] = 0
            request.num_ahead += 1
        self._table.sync(request)

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

    # -- log-probabilities

    def _keep_logprobs(self, request: Request, result: StepResult, i: int, count: int) -> None:
        completion = request.completion
        assert completion is not None
        chosen = result.chosen_logprobs[i]
        masked = result.masked_logprobs.get(i)
        top = result.top_logprobs.get(i)
        for j in range(count):
            best = _best(top, j, completion.num_logprobs)
            after = None if masked is None or request.matcher is None else _finite(masked[j])
            completion.logprobs.append(TokenLogprob(int(result.tokens[i, j]), _finite(chosen[j]), best, after))

    def _keep_targets(self, step: Step, result: StepResult, i: int) -> None:
        request = step.requests[i]
        targets = request.targets
        if request.finished or targets is None or request in step.dropped:
            return
        lo, hi = step.targets[i]
        targets.logprobs[lo:hi] = result.chosen_logprobs[i]
        targets.num_done = max(targets.num_done, hi)
        if targets.num_top:
            batch = step.batch
            first = int(batch.starts[i] + batch.num_new[i] - batch.num_logits[i])
            ids, logprobs = result.top_logprobs[i]
            for position in targets.positions[lo:hi].tolist():
                at = position - first
                targets.top[position] = (ids[at, : targets.num_top], logprobs[at, : targets.num_top])

    # -- ends

    def finish_computed(self, request: Request) -> None:
        """A request that samples nothing has computed all it was for."""
        self.finish(request, RequestStatus.LENGTH)

    def fail(self, request: Request, error: BaseException) -> None:
        self._metrics.failed += 1
        self.finish(request, RequestStatus.FAILED, error=error)

    def abort(self, request: Request, reason: str) -> None:
        self._metrics.aborted += 1
        self.finish(request, RequestStatus.ABORTED, error=RequestAborted(reason), reason=reason)

    def finish(
        self, request: Request, status: RequestStatus, *, error: BaseException | None = None, reason: str = ""
    ) -> None:
        """The end of one request: its row and pages are given back, its last output goes out."""
        if request.finished:
            return
        status, reason = self._validated(request, status, reason)
        source = request.job.source
        well = status < RequestStatus.ABORTED
        hold = isinstance(source, GenerateRequest) and source.hold and well
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
            self._finish_warming(request, error)
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
        why = grammar.validate(text)
        return (status, reason) if why is None else (RequestStatus.SCHEMA_VIOLATION, why)

    def _hold(self, request: Request) -> None:
        completion = request.completion
        hidden = completion is not None and completion.stop_id_hidden
        held = HeldRow(
            request_id=request.job.request_id,
            tokens=request.ids[: request.num_tokens - hidden].copy(),
            namespace=request.namespace,
            row=request.row,
            prefix=request.prefix,
            until=self._clock() + self._config.hold_s,
        )
        self._scheduler.hold(held)
        request.row, request.prefix = -1, None

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
            logprobs = tuple(tuple(max(p, _LEAST_LOGPROB) for p in one) for one in job.trie.logprobs())
            usage = Usage(prompt_tokens=job.num_prompt, cached_tokens=job.cached_tokens)
            self._outbox.append(ScoreOutput(request_id=job.request_id, logprobs=logprobs, usage=usage))

    def _finish_warming(self, request: Request, error: BaseException | None) -> None:
        job = request.job
        self._outbox.append(
            RequestOutput(
                request_id=job.request_id,
                finish_reason=FINISH_REASONS[request.status],
                usage=Usage(prompt_tokens=request.num_prompt, cached_tokens=job.cached_tokens),
                error=None if error is None else ErrorInfo.of(error),
            )
        )

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
        first_output, completion.began = not completion.began, True
        self._outbox.append(
            RequestOutput(
                request_id=request.job.request_id,
                index=request.index,
                text=completion.text,
                token_ids=tuple(new_ids),
                finish_reason=FINISH_REASONS[request.status] if over else None,
                matched_stop=completion.matched_stop,
                logprobs=tuple(completion.logprobs),
                prompt_logprobs=_prompt_logprobs(request) if first_output else (),
                prompt_token_ids=tuple(request.ids[: request.num_prompt].tolist()) if first_output else (),
                usage=_usage(request),
                coverage=request.grammar.coverage if over and request.grammar is not None else None,
                reason=reason,
                error=None if error is None else ErrorInfo.of(error),
            )
        )
        completion.text = ""
        completion.logprobs = []


def _usage(request: Request) -> Usage:
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


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    """One entry per prompt token, the first of which has none."""
    targets = request.targets
    if targets is None or targets.num_done < len(targets.positions):
        return ()
    entries: list[TokenLogprob | None] = [None]
    for at, (position, token_id) in enumerate(zip(targets.positions.tolist(), targets.ids.tolist(), strict=True)):
        top = targets.top.get(position)
        best = () if top is None else tuple((int(t), _finite(p)) for t, p in zip(*top, strict=True))
        entries.append(TokenLogprob(token_id, _finite(targets.logprobs[at]), best))
    return tuple(entries)


def _best(top: tuple[np.ndarray, np.ndarray] | None, position: int, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` best (id, log-probability) at a position."""
    if top is None or num <= 0:
        return ()
    ids, logprobs = top
    return tuple((int(t), _finite(p)) for t, p in zip(ids[position, :num], logprobs[position, :num], strict=True))


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)


def _request_error(error: Exception) -> SgliteError:
    if isinstance(error, SgliteError):
        return error
    return InvalidRequest(
        f"stop_regex {str(error)!r} took too long to search; make it simpler or use stop texts", param="stop_regex"
    )
