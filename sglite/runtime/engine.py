"""The engine core: takes requests, runs steps, gives outputs. One thread calls everything here.

A step is split at the logits, so that the device computes while the host prepares. Overlapped, with step n - 1
still on the device:

    schedule n          each decoding row is assumed to gain one token, which is read on the device
    forward n           queued
    apply n - 1         waits for that step's copy only; a row that ends here is stale in n, its token is dropped
    fill masks n        while the forward runs
    sample n            queued

Where it pays to know the tokens of n - 1 before n is scheduled (forced text, drafts: scheduler/turns.py), it is applied
first: a turn. The plain loop does the same for one step at a time and gives the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from sglite.errors import EngineDead, GrammarViolation, InvalidRequest, Overloaded, RequestAborted, SgliteError
from sglite.grammar.matcher import BatchAdvancer, CompiledGrammar
from sglite.protocol import GenerateRequest, RequestOutput, ScoreOutput, ScoreRequest
from sglite.runtime.batch import Executor, PendingStep, StepResult
from sglite.runtime.cache.access_log import AccessLog
from sglite.runtime.cache.manager import CacheManager
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.runtime.constraint import GrammarService, constrain
from sglite.runtime.followers import ApiRequest, Followers
from sglite.runtime.intake import Intake
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import Job, RequestStatus
from sglite.runtime.scheduler.drafts import PromptLookup
from sglite.runtime.scheduler.guesses import RunGuesser
from sglite.runtime.scheduler.heals import Heals
from sglite.runtime.scheduler.held import HeldRow, HeldRows
from sglite.runtime.scheduler.jumps import JumpPolicy
from sglite.runtime.scheduler.masks import MaskFiller
from sglite.runtime.scheduler.odds import RunOdds
from sglite.runtime.scheduler.outputs import OutputProcessor
from sglite.runtime.scheduler.policy import WaitingList, make_order
from sglite.runtime.scheduler.rows import RowTable, Step
from sglite.runtime.scheduler.scheduler import Scheduler
from sglite.runtime.scheduler.turns import StepSeconds, Turns, unmeasured
from sglite.text.types import TextTokenizer

__all__ = ["EngineCore", "GrammarService"]

_log = logging.getLogger(__name__)
_NEUTRAL = SamplingDefaults()

MAX_FAILED_STEPS = 5  # one after the other: then the device is broken, and no request would be answered any more


class EngineCore:
    """Answers requests with one executor.

    `grammars` None: constrained requests and `heal` are refused. `max_model_len`: prompt and output together, in
    tokens. `defaults`: the model's generation_config. The caller's loop is

        while open:
            if not core.has_work: wait until the waker was called
            for output in core.step(): route it by output.request_id

    All methods are called from one thread; only the waker (set_waker) is called from others, when something that
    the engine waits for (a compiled grammar) is there.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: TextTokenizer,
        grammars: GrammarService | None,
        config: EngineConfig,
        *,
        max_model_len: int,
        defaults: SamplingDefaults = _NEUTRAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.max_model_len = max_model_len
        self._executor = executor
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._clock = clock
        self._overlap = executor.overlaps if config.overlap is None else config.overlap
        seconds: StepSeconds = getattr(executor, "step_seconds", unmeasured)
        self._cache = CacheManager(executor.num_pages, executor.page_size, enabled=config.prefix_cache)
        self._table = RowTable(executor.max_rows, max_model_len, executor.page_size)
        budget = config.max_step_tokens or (8192 if executor.overlaps else 512)
        tokens = executor.num_pages * executor.page_size
        self._accesses = AccessLog(config.access_log, tokens) if config.access_log > 0 else None
        waiting = WaitingList(make_order(config.policy), max_wait_s=config.max_wait_s, gang_wait_s=config.gang_wait_s)
        jumps = JumpPolicy(overlaps=self._overlap, step_seconds=seconds)
        step_tokens = max(budget, executor.max_rows)
        guesses = self._overlap and not config.prompt_lookup  # drafts stand behind tokens that are known
        self._odds = RunOdds(guesses=guesses)
        self._scheduler = Scheduler(
            cache=self._cache,
            table=self._table,
            waiting=waiting,
            held=HeldRows(self._cache, self._table, hold_s=config.hold_s, clock=clock),
            metrics=self.metrics,
            max_step_tokens=step_tokens,
            lease_s=config.lease_s,
            lookup=_prompt_lookup(config, executor, seconds),
            heals=Heals(beside=executor.overlaps),
            find_shared=config.tree_attention and getattr(executor, "shares_prefix_reads", False),
            clock=clock,
            guesser=RunGuesser(self._table, self._odds, jumps, max_tokens=step_tokens) if guesses else None,
            log=self._accesses,
        )
        self._turns = Turns(seconds)
        filler = None if grammars is None else grammars.filler
        kept_rows = getattr(executor, "kept_mask_rows", 0)
        self._masks = MaskFiller(filler, rows=executor.mask_rows, places=kept_rows, asks=self._overlap)
        # Drafts are cut by the matcher when the next step is scheduled: by then its mask has to be there.
        self._caught_up = getattr(executor, "caught_up", None) if self._overlap and not config.prompt_lookup else None
        self._outputs = OutputProcessor(
            scheduler=self._scheduler,
            table=self._table,
            tokenizer=tokenizer,
            metrics=self.metrics,
            vocab_size=executor.vocab_size,
            advancer=filler if isinstance(filler, BatchAdvancer) else None,
            jumps=jumps,
            odds=self._odds,
            clock=clock,
        )
        self._intake = Intake(
            tokenizer,
            config,
            defaults,
            max_model_len=max_model_len,
            vocab_size=min(tokenizer.vocab_size, executor.vocab_size),
            cache_tokens=executor.num_pages * executor.page_size,
        )
        self._jobs: dict[str, Job] = {}
        self._followers = Followers()
        self._compiled: deque[tuple[Job, Future[CompiledGrammar]]] = deque()  # filled by other threads
        self._num_compiling = 0
        self._deadlines: dict[str, float] = {}
        self._queued: tuple[Step, PendingStep] | None = None  # the step on the device, when overlapped
        self._failed_in_a_row = 0
        self._counted = 0.0  # time.perf_counter() up to which metrics.step_s counts
        self._waker: Callable[[], None] = _nobody
        self._rest: Callable[[], None] = _nobody
        self._work: Callable[[], None] = _nobody

    # -- requests

    def add(self, request: GenerateRequest | ScoreRequest) -> None:
        """Take a request in. Raises InvalidRequest, PromptTooLong, OutOfPages or Overloaded without changing
        anything; errors found later come as a RequestOutput / ScoreOutput with `error`. One that continues a request
        that has not ended waits for it (followers.py)."""
        self._check_new(request.request_id)
        if isinstance(request, GenerateRequest):
            self._check_combination(request)
        if self._follows(request):
            self._followers.add(request)
            self._keep_deadline(request)
            return
        now = self._clock()
        held = self._held_for(request)
        if isinstance(request, ScoreRequest):
            job = self._intake.score(request, now, held)
            if held is not None:
                self._scheduler.held.hand_over(held, job.requests[0])
            self._enter(job)
            return
        job = self._intake.generate(request, now, held)
        if held is not None:
            self._scheduler.held.hand_over(held, job.requests[0])
        self._jobs[job.request_id] = job
        self.metrics.requests += 1
        self._keep_deadline(request)
        if request.grammar is None:
            self._start(job, None)
            return
        assert self._grammars is not None
        for one in job.requests:
            one.status = RequestStatus.WAITING_GRAMMAR
        future = self._grammars.compile(request.grammar)
        if future.done():
            self._grammar_ready(job, future)
            return
        self._num_compiling += 1
        future.add_done_callback(lambda done: self._on_compiled(job, done))

    def warm_prefix(
        self, request_id: str, token_ids: Sequence[int], *, namespace: str = "", lease_s: float = 60.0
    ) -> None:
        """Compute and lease a prefix. Answered by one finished RequestOutput; usage.prompt_tokens were kept."""
        self._check_new(request_id)
        now = self._clock()
        self._enter(self._intake.warm(request_id, token_ids, namespace=namespace, lease_until=now + lease_s, now=now))

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """End all completions of a request; each gives a last output with finish_reason "abort". A no-op for
        unknown and finished ids."""
        follower = self._followers.remove(request_id)
        if follower is not None:
            self._refuse(follower, RequestAborted(reason))
        job = self._jobs.get(request_id)
        if job is not None:
            for request in job.requests:
                if not request.finished:
                    self._outputs.abort(request, reason)
            self._forget_jobs()

    def release(self, request_id: str) -> None:
        """Give up a row that `hold` kept. A no-op for unknown ids."""
        self._scheduler.held.release(request_id)

    def end_program(self, program_id: str) -> None:
        """Nothing of that program will be asked again: what was kept for it may go first."""
        self._cache.end_program(program_id)

    def flush_cache(self) -> bool:
        """Drop every cached prefix that no running request uses. True when nothing is left in the cache."""
        return self._cache.flush()

    def rest(self) -> bool:
        """Nobody asks for anything just now. True: there is more to prepare."""
        return self._executor.rest()

    def set_waker(self, waker: Callable[[], None]) -> None:
        """`waker()` is called, from any thread, when has_work may have become true without a call from here."""
        self._waker = waker

    def close(self) -> None:
        """Abort everything and close the executor."""
        for request_id in [*self._jobs, *self._followers.ids()]:
            self.abort(request_id, "the engine is closing")
        self._executor.close()

    # -- the loop

    @property
    def has_work(self) -> bool:
        """step() has something to do. False while every request only waits for a grammar."""
        return bool(self._scheduler.has_work or self._queued is not None or self._outputs.has_output or self._compiled)

    @property
    def next_deadline(self) -> float | None:
        """time.monotonic() seconds at which step() has something to do even without a waker's call."""
        return min(self._deadlines.values(), default=None)

    def step(self) -> list[RequestOutput | ScoreOutput]:
        """One turn of the loop. Returns at once when there is nothing to do. Never raises for a request's sake;
        raises EngineDead where the executor only fails any more."""
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineDead(f"{self._failed_in_a_row} steps in a row failed; the log has their errors")
        now = self._clock()
        steps, self._counted = self.metrics.steps, time.perf_counter()
        self._take_in(now)
        gap = self._gap_work()
        if not self._overlap:
            self._plain_step(now)
        else:
            if self._queued is not None and self._wants_turn():
                self._apply_queued(None)
            self._overlapped_step(now)
        if self.metrics.steps > steps:
            self._count_time()
            self._turns.took(self._gap_work() - gap)
        followed = self._forget_jobs()
        if followed and self._overlap and self._queued is None:
            # The device has nothing to do: it gets its step before others, who may want this thread's time, hear of
            # the answers.
            self._overlapped_step(now)
            self._count_time()
        self._measure()
        return self._outputs.take()

    def _wants_turn(self) -> bool:
        requests = self._scheduler.running.requests
        accepted, drafts = self._scheduler.expected_drafts()
        return self._turns.pay(len(requests), runs=self._odds.expected(requests), accepted=accepted, drafts=drafts)

    def _plain_step(self, now: float) -> None:
        step = self._schedule(now)
        if step is None:
            return
        try:
            self._forward(step)
            self._fill(step)
            result = self._wait(self._sample(step))
        except Exception as error:  # noqa: BLE001 - the one boundary: a step's failure ends its requests, not the loop
            self._fail_step(step, error)
            return
        self._apply(step, result)

    def _overlapped_step(self, now: float) -> None:
        step = self._schedule(now)
        failed: Exception | None = None
        if step is not None:
            try:
                self._forward(step)
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
        self._apply_queued(step)
        if step is None:
            return
        if failed is not None:
            self._fail_step(step, failed)
            return
        try:
            self._fill(step, self._caught_up)
            self._queued = step, self._sample(step)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_step(step, error)

    def _apply_queued(self, following: Step | None) -> None:
        """The result of the step before; `following` is on the device behind it and may have read its KV."""
        if self._queued is None:
            return
        (step, pending), self._queued = self._queued, None
        try:
            result = self._wait(pending)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_step(step, error, following)
            return
        self._apply(step, result, following)

    # -- its phases

    def _schedule(self, now: float) -> Step | None:
        began = time.perf_counter()
        step = self._scheduler.schedule(now)
        for request, error in self._scheduler.taken_over():
            if error is None:
                self._outputs.finish(request, RequestStatus.LENGTH)
            else:
                self._outputs.fail(request, error)
        if step is not None:
            self.metrics.steps += 1
        self.metrics.schedule_s += time.perf_counter() - began
        return step

    def _forward(self, step: Step) -> None:
        began = time.perf_counter()
        if not self._overlap:
            self._rest()  # it computes here, mostly without the interpreter lock
        self._executor.forward(step.batch)
        if not self._overlap:
            self._work()
        self.metrics.forward_s += time.perf_counter() - began

    def _sample(self, step: Step) -> PendingStep:
        began = time.perf_counter()
        pending = self._executor.sample(step.batch)
        self.metrics.sample_s += time.perf_counter() - began
        return pending

    def _wait(self, pending: PendingStep) -> StepResult:
        began = time.perf_counter()
        self._rest()
        result = pending.wait()
        self._work()
        self.metrics.wait_s += time.perf_counter() - began
        return result

    def set_pauses(self, rest: Callable[[], None], work: Callable[[], None]) -> None:
        """Called around each time in which this thread leaves the interpreter to others: a wait for the device."""
        self._rest, self._work = rest, work

    def _gap_work(self) -> float:
        """Seconds, ever, of what has to happen between a result and the next launch where these do not overlap."""
        metrics = self.metrics
        return metrics.apply_s + metrics.schedule_s + metrics.forward_s

    def _count_time(self) -> None:
        """The turn so far belongs to its step."""
        now = time.perf_counter()
        self.metrics.step_s += now - self._counted
        self._counted = now

    def _apply(self, step: Step, result: StepResult, following: Step | None = None) -> None:
        self._count_time()  # requests that end here tell how long their steps took
        began = time.perf_counter()
        self._failed_in_a_row = 0
        self._outputs.apply(step, result, following)
        self.metrics.apply_s += time.perf_counter() - began

    def _fill(self, step: Step, over: Callable[[], bool] | None = None) -> None:
        if not len(step.masked):
            return
        began = time.perf_counter()
        plain = self._table.plain_masks(step) if self._masks.names(step) else None
        for request, error in self._masks.fill(step, self._executor.mask_buffer(), plain, over=over).items():
            if not isinstance(error, SgliteError):
                error = GrammarViolation(f"the grammar's mask failed: {type(error).__name__}: {error}")
            self._outputs.fail(request, error)
        if step.late:
            self._table.postpone(step)
            self.metrics.late_tokens += len(step.late)
        self.metrics.mask_s += time.perf_counter() - began

    def _fail_step(self, step: Step, error: Exception, following: Step | None = None) -> None:
        """The requests of this step end; who shared what it was computing starts over."""
        _log.exception("step %d failed", step.batch.step, exc_info=error)
        self.metrics.failed_steps += 1
        self._failed_in_a_row += not isinstance(error, SgliteError)  # ours says that a request is at fault
        for request, start in zip(step.requests, step.batch.starts.tolist(), strict=True):
            self._scheduler.discard_computed(request, start)
        for request in step.requests:
            if not request.finished:
                self._outputs.fail(request, _step_error(error))
        retracted = self._scheduler.recompute_tainted()
        if following is not None:
            following.dropped.update(retracted)
        if self._queued is not None:
            self._queued[0].dropped.update(retracted)

    # -- coming in

    def _take_in(self, now: float) -> None:
        while self._compiled:
            job, future = self._compiled.popleft()
            self._num_compiling -= 1
            self._grammar_ready(job, future)
        if self._deadlines:
            for request_id in [r for r, deadline in self._deadlines.items() if deadline <= now]:
                del self._deadlines[request_id]
                self.abort(request_id, "the request's deadline passed")
        self._scheduler.held.release_expired(now)

    def _on_compiled(self, job: Job, future: Future[CompiledGrammar]) -> None:
        """Called by the grammar side's thread."""
        self._compiled.append((job, future))
        self._waker()

    def _grammar_ready(self, job: Job, future: Future[CompiledGrammar]) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            error = SgliteError("the grammar's compilation was cancelled")
        if error is None:
            self._start(job, future.result())
            return
        for request in job.requests:
            if not request.finished:
                self._outputs.fail(request, error)

    def _start(self, job: Job, grammar: CompiledGrammar | None) -> None:
        """Give each completion its matcher and put it in line."""
        source = job.source
        assert isinstance(source, GenerateRequest)
        try:
            if grammar is not None or source.heal or source.grammar_after:
                constrain(job, grammar, self._grammars, self._tokenizer)
        except Exception as error:  # noqa: BLE001 - the compiler boundary: an engine of grammars may raise anything
            for request in job.requests:
                if not request.finished:
                    self._outputs.fail(request, error)
            return
        for request in job.requests:
            if not request.finished:
                request.status = RequestStatus.WAITING
                self._outputs.start(request)
            if not request.finished:
                self._scheduler.add(request)

    def _enter(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        self.metrics.requests += 1
        for request in job.requests:
            self._scheduler.add(request)

    # -- checks

    def _check_new(self, request_id: str) -> None:
        if request_id in self._jobs or self._followers.get(request_id) is not None:
            raise InvalidRequest(f"a request {request_id!r} is running already", param="request_id")
        waiting = len(self._scheduler.waiting) + self._num_compiling + len(self._followers)
        most = self.config.max_waiting
        if most is not None and waiting >= most:
            raise Overloaded(f"{most} requests are waiting; try again later")

    def _follows(self, request: ApiRequest) -> bool:
        """It continues one that will hold its row, and has not ended."""
        leader_id = request.continue_from
        if leader_id is None:
            return False
        job = self._jobs.get(leader_id)
        leader = self._followers.get(leader_id) if job is None else job.source
        return leader is not None and leader.hold

    def _held_for(self, request: GenerateRequest | ScoreRequest) -> HeldRow | None:
        if request.continue_from is None:
            return None
        held = self._scheduler.held.get(request.continue_from)
        if held is None:
            raise InvalidRequest(
                f"request {request.continue_from!r} holds no row (not finished, released or expired); send the whole"
                " prompt instead",
                param="continue_from",
            )
        if held.namespace.tenant != request.namespace:
            raise InvalidRequest("continue_from names a request of another namespace", param="continue_from")
        return held

    def _check_combination(self, request: GenerateRequest) -> None:
        several = request.sampling_params.n > 1
        if several and (request.hold or request.continue_from is not None):
            raise InvalidRequest("hold and continue_from work with n=1 only", param="n")
        if self._grammars is None and (request.grammar is not None or request.heal):
            raise InvalidRequest("this engine has no grammar support: grammar and heal do not work", param="grammar")
        if request.think_budget is not None and not request.grammar_after:
            raise InvalidRequest("think_budget needs grammar_after, the marker that it forces", param="think_budget")
        if request.close_on_budget and request.grammar is None:
            raise InvalidRequest("close_on_budget needs a grammar to close", param="close_on_budget")

    # -- bookkeeping

    def _forget_jobs(self) -> bool:
        """Whether requests that waited for one of them go on now."""
        followed = False
        while over := self._outputs.take_jobs_over():
            for request_id in over:
                self._jobs.pop(request_id, None)
                self._deadlines.pop(request_id, None)
                for follower in self._followers.take(request_id):
                    self._let_follow(follower)
                    followed = True
        return followed

    def _keep_deadline(self, request: ApiRequest) -> None:
        if isinstance(request, GenerateRequest) and request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline

    def _let_follow(self, request: ApiRequest) -> None:
        """The request that it waited for is over."""
        try:
            self.add(request)
        except SgliteError as error:
            self._refuse(request, error)

    def _refuse(self, request: ApiRequest, error: SgliteError) -> None:
        """It has waited for another request, and will not run. Nor will those that wait for it."""
        self._deadlines.pop(request.request_id, None)
        self._outputs.refuse(request, error)
        for follower in self._followers.take(request.request_id):
            self._let_follow(follower)

    def _measure(self) -> None:
        metrics, counts = self.metrics, self._cache.counts
        metrics.running = len(self._scheduler.running)
        metrics.waiting = len(self._scheduler.waiting)
        metrics.waiting_grammar = self._num_compiling
        metrics.held = len(self._scheduler.held)
        metrics.pages_total = counts.total
        metrics.pages_free = counts.free
        metrics.pages_cached = counts.cached
        metrics.pages_protected = counts.protected
        metrics.pages_owned = counts.owned
        metrics.evicted_pages = self._cache.num_evicted
        if metrics.running:
            metrics.held_token_steps += (counts.owned + counts.protected) * self._cache.page_size
            metrics.computed_token_steps += int(self._table.computed[self._scheduler.running.rows].sum())
        if self.config.check_invariants:
            for problem in self.problems():
                metrics.accounting_problems += 1
                _log.error("page accounting: %s", problem)

    def cache_rates(self) -> dict[str, float]:
        """How the prefix cache does against the best one in hindsight; empty where no access is logged. Takes about a
        millisecond for each access."""
        if self._accesses is None:
            return {}
        recent, best = self._accesses.rates()
        return {"recent_hit_rate": recent, "best_hit_rate": best}

    def problems(self) -> Iterable[str]:
        """What is wrong with the page accounting; empty when all is well. O(all pages), for tests and debugging."""
        return self._cache.problems([self._table.owned_pages(r) for r in self._scheduler.running.requests])


def _prompt_lookup(config: EngineConfig, executor: Executor, seconds: StepSeconds) -> PromptLookup | None:
    """None where it is off or the executor's mask buffer leaves no room for drafts."""
    rows = min(config.lookup_rows, executor.max_rows)
    drafts = min(config.prompt_lookup, (executor.mask_rows - executor.max_rows) // rows if rows else 0)
    return PromptLookup(max_drafts=drafts, max_rows=rows, step_seconds=seconds) if drafts > 0 else None


def _step_error(error: Exception) -> SgliteError:
    if isinstance(error, SgliteError):
        return error
    return SgliteError(f"the step failed: {type(error).__name__}: {error}")


def _nobody() -> None:
    """No waker is set: the caller polls has_work."""
