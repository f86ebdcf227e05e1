"""Who runs in the next step: the owner of the waiting and the running list.

    schedule()   1. what the running rows want, within the token budget (decoding rows first)
                 2. pages for it; without enough, held rows and then rows of the youngest program give theirs up
                 3. waiting requests, while rows, budget and pages last
                 4. the batch

A row's prompt becomes visible in the cache when it is *scheduled*: steps run in order and a layer writes all KV
before any row attends, so who matches it in the same step or later reads what was computed. Hence n completions,
siblings and scored continuations share a prompt by nothing but the cache. A request whose prompt goes on with
tokens that a running row is about to compute waits for that row.

Numbers only: no tensors, no text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglite.errors import OutOfPages
from sglite.runtime.batch import IntArray, PageUpdates, SharedPrefixes
from sglite.runtime.cache.access_log import AccessLog
from sglite.runtime.cache.manager import CacheManager, Prefix
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import Request, RequestStatus
from sglite.runtime.scheduler.admission import Admission, Admitted, before_sample
from sglite.runtime.scheduler.drafts import PromptLookup
from sglite.runtime.scheduler.guesses import NO_GUESSES, RunGuesser
from sglite.runtime.scheduler.heals import Heals
from sglite.runtime.scheduler.held import HeldRows
from sglite.runtime.scheduler.policy import WaitingList
from sglite.runtime.scheduler.rows import SAMPLES, TARGETS, RowTable, RowView, Step
from sglite.runtime.scheduler.running import NO_UPDATES, Running, joined

_MOST_BEFORE_DRAFTS = 64  # tokens that a row computes in the step of its drafts: forced text, but no prompt
_MIN_SHARED_TOKENS = 256  # below that reading a prefix once for several rows saves nothing


class Scheduler:
    def __init__(
        self,
        *,
        cache: CacheManager,
        table: RowTable,
        waiting: WaitingList,
        held: HeldRows,
        metrics: Metrics,
        max_step_tokens: int,
        lease_s: float,
        find_shared: bool,
        lookup: PromptLookup | None,
        heals: Heals,
        clock: Callable[[], float],
        guesser: RunGuesser | None = None,
        log: AccessLog | None = None,
    ) -> None:
        """`max_step_tokens` is at least the number of rows, so that every decoding row fits every step.
        `find_shared`: the executor wants to know which rows share a prefix."""
        assert max_step_tokens >= table.max_rows
        self.running = Running(cache, table)
        self.waiting = waiting
        self.held = held
        self.heals = heals
        self._admission = Admission(
            cache=cache,
            table=table,
            running=self.running,
            waiting=waiting,
            held=held,
            metrics=metrics,
            clock=clock,
            heals=heals,
            log=log,
        )
        self._cache = cache
        self._table = table
        self._metrics = metrics
        self._max_step_tokens = max_step_tokens
        self._lease_s = lease_s
        self._find_shared = find_shared
        self._lookup = lookup
        self._guesser = guesser
        self._clock = clock
        self._steps = 0
        self._sequence = 0
        self._groups: list[tuple[int, list[Request]]] = []  # rows that share a prefix, as of _groups_version
        self._groups_version = 0
        self._shared: SharedPrefixes = ()  # of a step of all running rows, as of _shared_version
        self._shared_version = -1
        self._over: list[tuple[Request, OutOfPages | None]] = []  # ended within schedule()

    # -- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or len(self.waiting) or self._over)

    def expected_drafts(self) -> tuple[float, int]:
        """Tokens that drafts would give if the next step came after the last one's result, and how many those are."""
        return (0.0, 0) if self._lookup is None else self._lookup.expected(self.running.requests)

    def add(self, request: Request) -> None:
        self._sequence += 1
        request.sequence = self._sequence
        request.status = RequestStatus.WAITING
        if request.job.program is not None and request.row < 0:
            request.cached_hint = self._cache.match_length(request.namespace, request.ids[: request.reusable])
        self.waiting.add(request)

    def remove(self, request: Request, *, keep: bool = True, hold: bool = False, over: bool = True) -> None:
        """Take a request off its row or the waiting list; the caller sets its next status. `keep`: what it computed
        stays cached. `hold`: its row and the lock on its prefix stay with it, for the caller. `over`: it will not
        come back, so what its program said about its prefix counts now."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RUNNING and request.row >= 0:
            self.running.remove(request, keep=keep)
        if request.access is not None and over:
            request.access.tokens = request.tokens[: max(request.num_tokens - request.samples, 0)].copy()
            request.access = None
        if request.prefix is not None and keep and over and request.status is RequestStatus.RUNNING:
            self._keep_for_program(request, request.prefix)
        if hold and request.prefix is not None:
            return
        if request.prefix is not None:
            self._cache.release(request.prefix)
            request.prefix = None
        if request.row >= 0:
            self._table.give(request.row)
            request.row = -1

    def _keep_for_program(self, request: Request, prefix: Prefix) -> None:
        """Lease what the request's program reads again; the rest of what this request computed goes first."""
        job, now = request.job, self._clock()
        if job.lease_until:
            end = job.lease_until  # asked for by itself: it goes last
            self._cache.lease(prefix, prefix.length, holder=job.request_id, end=end, since=0.0, now=now)
        program = job.program
        if program is None:
            return
        wanted = request.num_tokens if program.wanted_again < 0 else program.wanted_again
        first_own = request.completion.cached_tokens if request.completion is not None else request.num_prompt
        if wanted:
            end, since = now + self._lease_s, program.arrival or job.arrival
            self._cache.lease(prefix, wanted, holder=program.program_id, end=end, since=since, now=now)
        elif not program.remaining:
            self._cache.end_leases(prefix, program.program_id)
        self._cache.mark_done(prefix, max(wanted, first_own))

    def taken_over(self) -> list[tuple[Request, OutOfPages | None]]:
        """Requests that ended within the last schedule(): with an error, or None where nothing was left to do."""
        over, self._over = self._over, []
        return over

    def retract(self, request: Request, *, keep: bool = True) -> None:
        """Back to waiting with all its tokens; a sample under way is appended when it comes."""
        self.remove(request, keep=keep, over=False)
        request.status = RequestStatus.WAITING
        self.waiting.add(request)
        self._metrics.retractions += 1

    def discard_computed(self, request: Request, start: int) -> None:
        """The KV that a step computed for this request from `start` on is wrong, wherever the request is by now: its
        tokens may have gone to the cache already."""
        if request.status is RequestStatus.RUNNING and request.row >= 0:
            self._table.settle(request)
        self._cache.discard(request.namespace, request.tokens, start)

    def recompute_tainted(self) -> list[Request]:
        """Rows that share KV which turned out wrong start over; what they have under way must be dropped."""
        tainted = [r for r in self.running.requests if r.prefix is not None and r.prefix.tainted]
        for request in tainted:
            self.retract(request, keep=False)
        return tainted

    # -- the step

    def schedule(self, now: float) -> Step | None:
        """The next batch; None when nobody has anything to compute, or only after a token that is under way."""
        running, admitted = self.running, Admitted()
        if self._lookup is not None and self._lookup.tries(len(running)):
            self._draft(self._lookup)
        view = running.view()
        new, updates, guesses = view.rows, NO_UPDATES, NO_GUESSES  # the first two empty where nothing runs
        retracted = False
        if len(running):
            if self._guesser is not None and (guesses := self._guesser.guess(running.requests, view)):
                view = running.view()
            new = self._wanted(view)
            while (found := running.find_pages(view, new, now)) is None:
                if self._guesser is not None and guesses:
                    self._guesser.take_back(guesses)
                    guesses = NO_GUESSES
                elif self._make_room():
                    retracted = True
                else:
                    return None
                view = running.view()
                new = self._wanted(view)
            updates = found
            for i in view.within_prompt():
                if new[i]:
                    running.show_prompt(running.requests[i], int(new[i]))
        admits = bool(len(self.waiting)) and not retracted
        if admits:
            admitted = self._admission.admit(view, self._max_step_tokens - int(new.sum()), now)
            self._over += [(request, None) for request in admitted.over]
            if admitted.requests:
                updates = joined([updates, *running.pages_of(admitted.requests)])
                new = np.concatenate([new, np.array(admitted.new, np.int32)])
        step = self._build(new, admitted, updates, None if admits else view)
        if step is not None:
            step.guesses = guesses
        return step

    def _build(self, new: IntArray, admitted: Admitted, updates: PageUpdates, view: RowView | None) -> Step | None:
        """The batch of all running rows that compute something. `view`: of all of them, if there is one."""
        requests, rows = self.running.requests, self.running.rows
        if not len(new):
            return None
        if np.minimum.reduce(new) > 0:
            requests = requests.copy()
        else:
            active = new > 0
            if not active.any():
                return None
            requests = [requests[i] for i in np.flatnonzero(active).tolist()]
            rows, new, view = rows[active], new[active], None
        self._steps += 1
        self._metrics.computed_tokens += int(np.add.reduce(new))
        return self._table.build(
            self._steps,
            requests,
            rows,
            new,
            loads=admitted.loads,
            page_updates=updates,
            shared_prefixes=self._shared_prefixes(requests) if self._find_shared else (),
            view=view,
        )

    def _wanted(self, view: RowView) -> IntArray:
        """New tokens of each running row within the budget."""
        new = view.wanted()
        for i in view.with_flag(TARGETS):
            new[i] = before_sample(self.running.requests[i], int(view.computed[i]), int(new[i]))
        return _within(new, view.drafts, self._max_step_tokens)

    def _draft(self, lookup: PromptLookup) -> None:
        """Rows whose last token is known may try what could follow it, behind forced text that they compute."""
        view = self.running.view()
        wanted = view.wanted()
        draws = (view.flags & (SAMPLES | TARGETS)) == SAMPLES
        ready = draws & (view.in_flight == 0) & (wanted >= 1) & (wanted <= _MOST_BEFORE_DRAFTS)
        found: list[tuple[Request, IntArray]] = []
        for i in np.flatnonzero(draws).tolist():
            request = self.running.requests[i]
            self._table.settle(request)
            if not request.num_output:
                continue
            lookup.watch(request)
            if ready[i] and not request.num_ahead and len(drafts := lookup.drafts(request)):
                found.append((request, drafts))
        total = int(wanted.sum()) + sum(len(drafts) for _, drafts in found)
        if found and lookup.may_run(len(wanted), total):
            for request, drafts in found:
                self._table.draft(request, drafts)

    def _make_room(self) -> bool:
        """Someone gives pages up. False when nobody is left to run."""
        if self.held.release_youngest() or self._admission.release_reserved(None):
            return True
        if len(self.running) > 1:
            self.retract(max(reversed(self.running.requests), key=lambda request: request.job.since))
            return True
        request = self.running.requests[0]
        if self._table.in_flight[request.row]:  # the token under way may end it: look again when it is known
            return False
        self.remove(request)
        error = OutOfPages(
            f"the KV cache of {self._cache.num_pages * self._cache.page_size} tokens is full with this request alone"
            f" ({request.num_tokens} tokens); give the engine more KV memory or ask for fewer tokens"
        )
        self._over.append((request, error))
        return False

    def _shared_prefixes(self, requests: list[Request]) -> SharedPrefixes:
        """Groups of batch indices; looked for again only when a row came, went or grew its prefix."""
        everyone = len(requests) == len(self.running)
        if everyone and self._shared_version == self.running.version:
            return self._shared
        if self._groups_version != self.running.version:
            with_prefix = [(r, r.prefix) for r in self.running.requests if r.prefix is not None]
            groups = self._cache.shared_groups([p for _, p in with_prefix], _MIN_SHARED_TOKENS)
            self._groups = [(length, [with_prefix[i][0] for i in indices]) for length, indices in groups]
            self._groups_version = self.running.version
        places = {request: i for i, request in enumerate(requests)}
        computed = self._table.computed
        found = [
            (n, tuple(places[r] for r in group if r in places and computed[r.row] >= n)) for n, group in self._groups
        ]
        shared = tuple((n, indices) for n, indices in found if len(indices) > 1)
        if everyone and all(
            len(indices) == len(group) for (_, indices), (_, group) in zip(found, self._groups, strict=True)
        ):
            self._shared, self._shared_version = shared, self.running.version  # which stays so until the version grows
        return shared


def _within(new: IntArray, drafts: IntArray, budget: int) -> IntArray:
    """Cut new tokens to the budget: rows that decode (with their drafts) come first, then the others in order."""
    if int(np.add.reduce(new)) <= budget:
        return new
    first = (new <= 1) | (drafts > 0)
    left = budget - int(new[first].sum())
    new = new.copy()
    for i in np.flatnonzero(~first).tolist():
        new[i] = min(int(new[i]), max(left, 0))
        left -= int(new[i])
    return new
