"""Specs to compiled grammars: cached, single-flight, off the step loop.

    compile(spec) -> Future    the same spec asked again while it compiles shares the flight
                               a grammar or a refusal (GrammarError) is kept in an LRU capped in bytes
                               a time-out or an unforeseen failure is not kept: asking again tries again

A flight has two legs. Planning (our front end, in Python) and a first try of the engine, unless the grammar is plainly
tame, happen in a worker process with limits that kill: neither the interpreter lock nor the memory of this process is
at stake. The engine's own compile is then done here, in a thread without the interpreter lock (2 ms typically). What
does not plan within `quick_seconds` is begun again in a second worker: dear constraints wait for each other only.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sglite.errors import GrammarError, GrammarTimeout, GrammarTooLarge, InvalidRequest, SgliteError
from sglite.grammar.budget import BudgetMatcher
from sglite.grammar.engines import route
from sglite.grammar.engines.llguidance import LLGuidanceEngine, LLGuidanceGrammar
from sglite.grammar.fill import BatchFiller
from sglite.grammar.heal import heal_token
from sglite.grammar.isolation import Worker
from sglite.grammar.matcher import CompiledGrammar, Matcher
from sglite.grammar.reach import Reach
from sglite.grammar.regex_size import regex_size
from sglite.grammar.residual.matcher import WithResidual, warm_tables
from sglite.grammar.residual.tracker import Tracker
from sglite.grammar.vocab import Vocab
from sglite.grammar.worker import Job
from sglite.protocol import Coverage, GrammarSpec

if TYPE_CHECKING:
    from sglite.grammar.engines.xgrammar import XGrammarEngine, XGrammarGrammar

_log = logging.getLogger(__name__)

_LONG_SOURCE = 16_384  # characters
_CLOSED = "the grammar compiler is closed"
_REFUSAL_BYTES = 2048  # what a refusal counts in the cache, besides its spec's text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerConfig:
    num_threads: int = 2  # compiles at a time; they release the interpreter lock
    fill_threads: int = 2
    cache_bytes: int = 256 << 20
    quick_seconds: float = 0.5  # CPU time of a plan before it counts as dear
    cpu_seconds: float = 2.0  # CPU time of a dear plan before it is refused
    memory_bytes: int = 512 << 20  # of one plan
    isolate: bool = True  # False: everything in this process, without limits of time and memory (tests)


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar with what our front end adds to the engine's."""

    base: LLGuidanceGrammar | XGrammarGrammar
    plan: route.Plan = field(repr=False)
    vocab: Vocab = field(repr=False)

    @property
    def spec(self) -> GrammarSpec:
        return self.base.spec

    @property
    def coverage(self) -> Coverage:
        return self.plan.coverage

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + len(self.spec.source)

    def matcher(self, *, budget: int | None = None) -> Matcher:
        matcher: Matcher = self.base.matcher()
        if self.plan.residual is not None:
            matcher = WithResidual(matcher, Tracker(self.plan.residual), self.vocab)
        return matcher if budget is None else BudgetMatcher(matcher, budget, self.vocab, self._reach)

    @cached_property
    def _reach(self) -> Reach:
        reach = route.reach_of(self.spec, self.plan.grammar)
        if reach is None:
            raise InvalidRequest(
                f"close_on_budget is not available for {self.spec.kind} constraints", param="close_on_budget"
            )
        more = 0 if self.plan.residual is None else self.plan.residual.number_bytes
        return Reach(opening=reach.opening + more, inside=reach.inside + more)

    def validate(self, text: str) -> str | None:
        return self.plan.validate(text)


class GrammarCompiler:
    """Thread-safe. `close` when done; a compile in flight is then waited for (it is bounded)."""

    def __init__(self, vocab: Vocab, config: CompilerConfig = CompilerConfig()) -> None:
        self.vocab = vocab
        self.config = config
        self.filler = BatchFiller(config.fill_threads)
        self._pool = ThreadPoolExecutor(config.num_threads, thread_name_prefix="sglite-grammar")
        self._dear_pool = ThreadPoolExecutor(1, thread_name_prefix="sglite-grammar-dear")
        self._quick_worker = Worker()
        self._dear_worker = Worker()
        self._lock = threading.Lock()
        self._flights: dict[GrammarSpec, Future[CompiledGrammar]] = {}
        self._done: OrderedDict[GrammarSpec, tuple[CompiledGrammar | GrammarError, int]] = OrderedDict()
        self._done_bytes = 0
        self._engine_lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future that gives the grammar or raises GrammarError (refused), GrammarTimeout (ask again), SgliteError."""
        with self._lock:
            known = self._done.get(spec)
            if known is not None:
                self._done.move_to_end(spec)
                return _ready(known[0])
            flight = self._flights.get(spec)
            if flight is None:
                flight = Future()
                _submit(self._pool, self._fly, spec, flight)
                self._flights[spec] = flight
            return flight

    def compile_now(self, spec: GrammarSpec) -> CompiledGrammar:
        """The same, waited for, with what else is made ready of it."""
        found = self.compile(spec).result()
        if isinstance(found, Grammar) and isinstance(found.base, LLGuidanceGrammar):
            found.base.is_ready.wait()
        return found

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        """See `sglite.grammar.heal.heal_token`."""
        return heal_token(token_id, inner, self.vocab)

    def warm(self) -> None:
        """Begin to make all tables and start the worker, ahead of the first constraint. Returns at once."""
        if self.config.isolate:
            self._pool.submit(self._quick_worker.start)
        self._pool.submit(lambda: self._llguidance)
        self._pool.submit(self.vocab.warm)

    def close(self) -> None:
        for pool in (self._pool, self._dear_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        for worker in (self._quick_worker, self._dear_worker):
            worker.close()
        self.filler.close()
        with self._lock:
            stranded = list(self._flights.values())
            self._flights.clear()
        for flight in stranded:
            flight.set_exception(SgliteError(_CLOSED))

    @property
    def cached_bytes(self) -> int:
        return self._done_bytes

    def _fly(self, spec: GrammarSpec, flight: Future[CompiledGrammar], *, dear: bool = False) -> None:
        try:
            plan = self._plan(spec, dear=dear)
            if plan is None:
                _submit(self._dear_pool, self._fly, spec, flight, dear=True)
                return
            result: CompiledGrammar | BaseException = self._build(spec, plan)
        except SgliteError as error:
            result = error
        except RecursionError as error:
            result = GrammarTooLarge("the constraint is nested too deeply")
            result.__cause__ = error
        except Exception as error:  # noqa: BLE001 - engines raise types of their own; a bad constraint ends one request
            _log.exception("compile of a %s constraint failed", spec.kind)
            result = SgliteError(f"the constraint could not be compiled: {type(error).__name__}: {error}")
            result.__cause__ = error
        self._land(spec, flight, result)
        if isinstance(result, Grammar) and isinstance(result.base, LLGuidanceGrammar):
            self._llguidance.get_ready(result.base)

    def _land(
        self, spec: GrammarSpec, flight: Future[CompiledGrammar], result: CompiledGrammar | BaseException
    ) -> None:
        with self._lock:
            self._flights.pop(spec, None)
            if not isinstance(result, BaseException) or isinstance(result, GrammarError):
                self._keep(spec, result)
        if isinstance(result, BaseException):
            flight.set_exception(result)
        else:
            flight.set_result(result)

    def _plan(self, spec: GrammarSpec, *, dear: bool) -> route.Plan | None:
        """None: too dear for the quick lane."""
        if not self.config.isolate or not _may_be_dear(spec):
            return route.plan(spec)
        seconds = self.config.cpu_seconds if dear else self.config.quick_seconds
        worker = self._dear_worker if dear else self._quick_worker
        answer = worker.ask(Job(spec, seconds, self.config.memory_bytes))
        if answer.error is not None:
            raise answer.error.to_exception()
        if answer.status == "slow":
            if dear:
                raise GrammarTimeout(f"the constraint takes over {seconds:g} s to compile")
            return None
        is_validated = not answer.coverage.exact and spec.kind != "tools"  # of which nothing is checked afterwards
        if is_validated or answer.coverage.engine != LLGuidanceEngine.name:
            return route.plan(spec)  # validators do not travel; the worker has shown that this is cheap
        return route.Plan.exact(answer.grammar, answer.coverage, answer.residual)

    def _build(self, spec: GrammarSpec, plan: route.Plan) -> CompiledGrammar:
        if plan.residual is not None:
            warm_tables(plan.residual, self.vocab)
        if plan.engine == "llguidance":
            return Grammar(self._llguidance.compile(spec, plan.grammar), plan, self.vocab)
        return Grammar(self._xgrammar.compile(spec), plan, self.vocab)

    def _keep(self, spec: GrammarSpec, result: CompiledGrammar | GrammarError) -> None:
        size = _REFUSAL_BYTES + len(spec.source) if isinstance(result, GrammarError) else result.nbytes
        if size > self.config.cache_bytes:
            return
        self._done[spec] = (result, size)
        self._done_bytes += size
        while self._done_bytes > self.config.cache_bytes:
            _, (_, freed) = self._done.popitem(last=False)
            self._done_bytes -= freed

    @cached_property
    def _llguidance_engine(self) -> LLGuidanceEngine:
        threads = self.config.fill_threads
        return LLGuidanceEngine(self.vocab, parallel=2 * threads if threads > 1 else 1)

    @property
    def _llguidance(self) -> LLGuidanceEngine:
        with self._engine_lock:
            return self._llguidance_engine

    @cached_property
    def _xgrammar_engine(self) -> XGrammarEngine:
        # Here and not at the top: xgrammar imports torch, which a process that only checks schemas does without.
        from sglite.grammar.engines.xgrammar import XGrammarEngine

        return XGrammarEngine(self.vocab)

    @property
    def _xgrammar(self) -> XGrammarEngine:
        with self._engine_lock:
            return self._xgrammar_engine


def _may_be_dear(spec: GrammarSpec) -> bool:
    """What is planned in the worker: every schema, and what is long for llguidance. xgrammar's compile is kept cheap by
    the check of its rules."""
    if spec.kind in ("json_object", "ebnf"):
        return False
    if spec.kind == "structural_tag":
        return "json_schema" in spec.source
    if spec.kind == "regex" and regex_size(spec.source).expanded > _LONG_SOURCE:
        return True
    return spec.kind in ("json_schema", "tools") or len(spec.source) > _LONG_SOURCE


def _submit(pool: ThreadPoolExecutor, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        pool.submit(function, *args, **kwargs)
    except RuntimeError as error:
        raise SgliteError(_CLOSED) from error


def _ready(result: CompiledGrammar | GrammarError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    if isinstance(result, GrammarError):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future
