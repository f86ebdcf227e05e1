"""Who runs in the next step: the owner of the waiting and the running list.

    schedule()   1. what the running rows want, within the token budget (decoding rows first)
                 2. pages for it; when there are not enough: held rows, then the youngest rows, give theirs up
                 3. waiting requests, while rows, budget and pages last
                 4. the batch

A row's prompt becomes visible in the cache when it is *scheduled*: steps run in order and a layer writes all KV
before any row attends, so who matches it in the same step or later reads what was computed. Hence n completions,
siblings and scored continuations share a prompt by nothing but the cache. A request whose prompt goes on with
tokens that a running row is about to compute waits for that row.

Numbers only: no tensors, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sglite.errors import OutOfPages
from sglite.runtime.batch import IntArray, PageUpdates, RowLoad
from sglite.runtime.cache.manager import CacheManager, Prefix
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import Request, RequestStatus
from sglite.runtime.scheduler.held import HeldRow, HeldRows
from sglite.runtime.scheduler.policy import WaitingList
from sglite.runtime.scheduler.rows import TARGETS, RowTable, RowView, Step

_HEADROOM_TOKENS = 16  # of growth that each running row keeps when another one is admitted
_MIN_SHARED_TOKENS = 256  # below that reading a prefix once for several rows saves nothing
_NO_UPDATES = PageUpdates(*(np.empty(0, np.int32) for _ in range(3)))


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
        hold_s: float,
        find_shared: bool,
        clock: Callable[[], float],
    ) -> None:
        """`max_step_tokens` is at least the number of rows, so that every decoding row fits every step.
        `find_shared`: the executor wants to know which rows share a prefix."""
        assert max_step_tokens >= table.max_rows
        self.running: list[Request] = []  # in the order of admission: the youngest is last
        self.waiting = waiting
        self.held = held
        self._cache = cache
        self._table = table
        self._metrics = metrics
        self._max_step_tokens = max_step_tokens
        self._lease_s = lease_s
        self._hold_s = hold_s
        self._find_shared = find_shared
        self._groups: list[tuple[int, list[Request]]] | None = []  # None: to be found again
        self._clock = clock
        self._rows = np.empty(0, np.int32)  # of running, renewed when it changed
        self._rows_old = False
        self._steps = 0
        self._sequence = 0
        self._over: list[tuple[Request, OutOfPages | None]] = []  # ended within schedule()

    # -- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._over)

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
            self.running.remove(request)
            self._rows_old = True
            self._table.leave(request)
            self._give_pages_up(request, keep=keep)
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
            self._cache.lease(prefix, prefix.length, holder=job.request_id, end=job.lease_until, now=now)
        program = job.program
        if program is None:
            return
        wanted = request.num_tokens if program.wanted_again < 0 else program.wanted_again
        first_own = request.completion.cached_tokens if request.completion is not None else request.num_prompt
        if wanted:
            end = now + self._lease_s
            self._cache.lease(prefix, wanted, holder=program.program_id, end=end, now=now)
        self._cache.mark_done(prefix, max(wanted, first_own))

    def hold(self, held: HeldRow) -> None:
        self.held.add(held)

    def continue_held(self, held: HeldRow, request: Request) -> None:
        """`request`, whose tokens begin with the held ones, takes over row and lock; where they are gone already it
        is admitted like any other and finds the prefix cached."""
        request.row, held.row = held.row, -1
        request.prefix, held.prefix = held.prefix, None
        held.until = max(held.until, self._clock() + self._hold_s)

    def release_expired(self, now: float) -> None:
        if len(self.held):
            for held in self.held.expired(now):
                self.release_held(held.request_id)

    def release_held(self, request_id: str) -> None:
        held = self.held.pop(request_id)
        if held is not None:
            self.give_up(held)

    def taken_over(self) -> Iterator[tuple[Request, OutOfPages | None]]:
        """Requests that ended within the last schedule(): with an error, or None where nothing was left to do."""
        over, self._over = self._over, []
        return iter(over)

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
        tainted = [r for r in self.running if r.prefix is not None and r.prefix.tainted]
        for request in tainted:
            self.retract(request, keep=False)
        return tainted

    # -- the step

    def schedule(self, now: float) -> Step | None:
        view = RowView(self._table, self._running_rows())
        new, updates = view.rows, _NO_UPDATES  # both empty where nothing runs
        budget = self._max_step_tokens
        retracted = False
        if self.running:
            new = self._wanted(view)
            while (found := self._find_pages(view, new, now)) is None:
                retracted = True
                if not self._make_room(now):
                    return None
                view = RowView(self._table, self._running_rows())
                new = self._wanted(view)
            updates = found
            budget -= int(new.sum())
            self._show_prompts(view, new)
        loads: list[RowLoad] = []
        if len(self.waiting) and not retracted:
            num_before = len(self.running)
            new_admitted = self._admit(view, budget, now, loads)
            if len(self.running) > num_before:
                updates = _joined(updates, [self._all_pages(r) for r in self.running[num_before:]])
                new = np.concatenate([new, np.array(new_admitted, np.int32)])
        rows = self._running_rows()
        active = new > 0
        if not len(rows) or not active.any():
            return None
        requests = self.running
        if not active.all():
            requests = [requests[i] for i in np.flatnonzero(active).tolist()]
            rows, new = rows[active], new[active]
        else:
            requests = requests.copy()
        self._steps += 1
        shared = self._shared_prefixes(requests) if self._find_shared else ()
        step = self._table.build(
            self._steps, requests, rows, new, loads=loads, page_updates=updates, shared_prefixes=shared
        )
        self._metrics.computed_tokens += step.batch.num_tokens
        return step

    def _shared_prefixes(self, requests: list[Request]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Groups of batch indices; looked for again only when a row came, went or grew its prefix."""
        if self._groups is None:
            with_prefix = [(r, r.prefix) for r in self.running if r.prefix is not None]
            groups = self._cache.shared_groups([p for _, p in with_prefix], _MIN_SHARED_TOKENS)
            self._groups = [(length, [with_prefix[i][0] for i in indices]) for length, indices in groups]
        if not self._groups:
            return ()
        places = {request: i for i, request in enumerate(requests)}
        computed = self._table.computed
        found = (
            (n, tuple(places[r] for r in group if r in places and computed[r.row] >= n)) for n, group in self._groups
        )
        return tuple((n, indices) for n, indices in found if len(indices) > 1)

    def _running_rows(self) -> IntArray:
        if self._rows_old:
            self._groups = None
            self._rows = np.array([r.row for r in self.running], np.int32)
            self._rows_old = False
        return self._rows

    def _wanted(self, view: RowView) -> IntArray:
        """New tokens of each running row within the budget. A row with targets does not sample in the same step:
        its last token waits for the next one."""
        new = view.wanted()
        for i in view.with_flag(TARGETS):
            new[i] = self._before_sample(self.running[i], int(view.computed[i]), int(new[i]))
        return _within(new, self._max_step_tokens)

    @staticmethod
    def _before_sample(request: Request, computed: int, new: int) -> int:
        targets = request.targets
        if targets is None or not request.samples or not len(targets.positions):
            return new
        last_target = int(targets.positions[-1])
        return min(new, last_target + 1 - computed) if computed <= last_target else new

    # -- pages

    def _find_pages(self, view: RowView, new: IntArray, now: float) -> PageUpdates | None:
        """Pages for the new tokens of running rows; None (and nothing changed) when there are not enough."""
        missing = self._table.missing_pages(view, new)
        total = int(missing.sum())
        if total == 0:
            return _NO_UPDATES
        pages = self._cache.allocate(total, now)
        if pages is None:
            return None
        short = missing > 0
        if short.all():
            return self._table.add_pages(view.rows, missing, pages)
        return self._table.add_pages(view.rows[short], missing[short], pages)

    def _make_room(self, now: float) -> bool:
        """Someone gives pages up. False when nobody is left to run."""
        if self._release_held():
            return True
        if len(self.running) > 1:
            self.retract(self.running[-1])
            return True
        request = self.running[0]
        if self._table.in_flight[request.row]:  # the token under way may end it: look again when it is known
            return False
        error = OutOfPages(
            f"the KV cache of {self._cache.num_pages * self._cache.page_size} tokens is full with this request alone"
            f" ({request.num_tokens} tokens); give the engine more KV memory or ask for fewer tokens"
        )
        self._over.append((request, error))
        self.remove(request)
        return False

    def _release_held(self) -> bool:
        oldest = self.held.oldest_locked()
        if oldest is None:
            return False
        self.give_up(oldest)
        return True

    def give_up(self, held: HeldRow) -> None:
        """A held row's pages become evictable and its row free; its tokens are still known."""
        if held.prefix is not None:
            self._cache.release(held.prefix)
            held.prefix = None
        if held.row >= 0:
            self._table.give(held.row)
            held.row = -1

    def _give_pages_up(self, request: Request, *, keep: bool) -> None:
        prefix = request.prefix
        assert prefix is not None
        owned = self._table.owned_pages(request).copy()
        tokens = request.ids[prefix.length : self._table.known_computed(request)] if keep else request.ids[:0]
        self._cache.commit(prefix, tokens, owned)

    def _all_pages(self, request: Request) -> PageUpdates:
        n = int(self._table.num_pages[request.row])
        columns = np.arange(n, dtype=np.int32)
        return PageUpdates(np.full(n, request.row, np.int32), columns, self._table.pages[request.row, :n].copy())

    def _show_prompts(self, view: RowView, new: IntArray) -> None:
        """Rows within their prompt: what they compute in this step can be matched from now on."""
        for i in view.within_prompt():
            if new[i]:
                self._show_prompt(self.running[i], int(new[i]))

    def _show_prompt(self, request: Request, new: int) -> None:
        prefix = request.prefix
        assert prefix is not None
        page = self._table.page_size
        end = min(int(self._table.computed[request.row]) + new, request.num_prompt)
        end -= end % page
        if end > prefix.length:
            first, last = prefix.length // page, end // page
            pages = self._table.pages[request.row, first:last].copy()
            if self._cache.extend(prefix, request.ids[prefix.length : end], pages):
                self._groups = None

    # -- admission

    def _admit(self, view: RowView, budget: int, now: float, loads: list[RowLoad]) -> list[int]:
        """Move waiting requests to rows; returns the new tokens of each."""
        admitted: list[Request] = []
        new: list[int] = []
        prefilling = [self.running[i] for i in view.within_prompt()] if self._cache.enabled else []
        for request in self.waiting.ordered(now):
            if budget <= 0 or not (request.row >= 0 or self._table.num_free or self._free_held_row()):
                break
            if self.waiting.waits_for_siblings(request, now):
                continue
            prefix = self._cache.acquire(request.namespace, request.ids[: request.reusable])
            if any(self._will_share(request, prefix, other) for other in prefilling):
                self._cache.release(prefix)
                continue
            if not self._place(request, prefix, now):
                self._cache.release(prefix)
                break
            admitted.append(request)
            if request.row >= 0:  # else it had nothing to compute and is over
                computed = int(self._table.computed[request.row])
                n = self._before_sample(request, computed, min(request.end, request.num_tokens) - computed)
                n = min(n, budget)
                budget -= n
                new.append(n)
                loads.append(_row_load(request))
                self._show_prompt(request, n)
                if self._cache.enabled and computed + n < request.num_prompt:
                    prefilling.append(request)
        for request in admitted:
            self.waiting.remove(request)
        return new

    def _free_held_row(self) -> bool:
        """Held rows give way to waiting requests where more than half of all rows are held, or nothing else runs."""
        while not self._table.num_free:
            if self.running and 2 * self.held.num_rows <= self._table.max_rows:
                return False
            if not self._release_held():
                return False
        return True

    def _will_share(self, request: Request, prefix: Prefix, other: Request) -> bool:
        """`other`, a row within its prompt, is about to compute tokens of `request`, which waits to share them."""
        if other.namespace != request.namespace or (other.prefix is not None and other.prefix.tainted):
            return False
        n = min(request.reusable, other.num_prompt)
        if n <= prefix.length:
            return False
        different = request.ids[prefix.length : n] != other.ids[prefix.length : n]
        first = int(different.argmax())
        common = prefix.length + (first if different[first] else n - prefix.length)
        common -= common % self._table.page_size
        return common > max(prefix.length, int(self._table.computed[other.row]))

    def _place(self, request: Request, prefix: Prefix, now: float) -> bool:
        """A row and all pages of the known tokens for a waiting request. False (nothing changed) without room.
        A request with nothing to compute is over at once."""
        page = self._table.page_size
        known = min(request.end, request.num_tokens)
        if prefix.length >= known:
            self._start_over(request, prefix)
            return True
        needed = -(-known // page) - prefix.length // page
        if self.running:
            growth = -(-_HEADROOM_TOKENS // page) * len(self.running)
            if self._cache.available - needed < min(growth, self._cache.num_pages // 4):
                return False
        pages = self._cache.allocate(needed, now)
        while pages is None and not self.running and (self._release_held() or self._release_reserved(request)):
            pages = self._cache.allocate(needed, now)
        if pages is None:
            return False
        shared = self._cache.pages_of(prefix)
        if request.prefix is not None:  # of the row that it continues
            self._cache.release(request.prefix)
            self._metrics.resumptions += 1
        else:
            self._metrics.admissions += 1
        self._count(request, prefix.length)
        request.prefix = prefix
        if request.row < 0:
            request.row = self._table.take()
        request.status = RequestStatus.RUNNING
        self._table.load(request, np.concatenate([shared, pages]), prefix.length)
        self.running.append(request)
        self._rows_old = True
        return True

    def _release_reserved(self, head: Request) -> bool:
        """Another waiting request gives up the held row that it was to continue; it is admitted like any other."""
        for request in self.waiting.ordered(self._clock()):
            if request is not head and request.prefix is not None:
                self._cache.release(request.prefix)
                request.prefix = None
                if request.row >= 0:
                    self._table.give(request.row)
                    request.row = -1
                return True
        return False

    def _start_over(self, request: Request, prefix: Prefix) -> None:
        if request.prefix is not None:
            self._cache.release(request.prefix)
        if request.row >= 0:
            self._table.give(request.row)
            request.row = -1
        self._count(request, prefix.length)
        request.prefix = prefix
        request.status = RequestStatus.RUNNING  # without a row; the caller of schedule() ends it
        self._over.append((request, None))

    def _count(self, request: Request, cached: int) -> None:
        if request.completion is None:
            if request.index == 0:
                request.job.cached_tokens = min(cached, request.job.num_prompt)
        elif not request.num_output:
            request.completion.cached_tokens = min(cached, request.num_prompt)
        self._metrics.prompt_tokens += request.num_tokens
        self._metrics.cached_tokens += cached


def _within(new: IntArray, budget: int) -> IntArray:
    """Cut new tokens to the budget: rows that want one come first, then the others in order."""
    if int(new.sum()) <= budget:
        return new
    ones = new == 1
    left = budget - int(ones.sum())
    new = new.copy()
    for i in np.flatnonzero(~ones).tolist():
        new[i] = min(int(new[i]), left)
        left -= int(new[i])
    return new


def _joined(first: PageUpdates, others: list[PageUpdates]) -> PageUpdates:
    every = [first, *others]
    return PageUpdates(
        np.concatenate([u.rows for u in every]),
        np.concatenate([u.columns for u in every]),
        np.concatenate([u.pages for u in every]),
    )


def _row_load(request: Request) -> RowLoad:
    sampling = request.sampling
    prompt = request.ids[: request.num_prompt].copy() if sampling.repetition_penalty != 1.0 else None
    output = None
    if sampling.needs_counts and request.num_output:
        output = request.ids[request.num_prompt : request.num_tokens].copy()
    return RowLoad(request.row, sampling, prompt, output)
