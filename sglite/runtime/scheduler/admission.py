"""From the waiting list to a row.

For each request in the list's order, while rows, budget and pages last:

    siblings that were announced and may still come         it is passed over for a moment
    a running row is about to compute more of its prompt    it is passed over until that is there to share
    no room for all of its known tokens                     nobody behind it is admitted either
    else                                                    a row, its pages, and what fits of its tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglite.runtime.batch import IntArray, RowLoad
from sglite.runtime.cache.access_log import AccessLog
from sglite.runtime.cache.manager import CacheManager, Prefix
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import Moment, Request, RequestStatus
from sglite.runtime.scheduler.heals import Heals
from sglite.runtime.scheduler.held import HeldRows
from sglite.runtime.scheduler.policy import WaitingList
from sglite.runtime.scheduler.rows import RowTable, RowView
from sglite.runtime.scheduler.running import Running

_HEADROOM_TOKENS = 16  # of growth that each running row keeps when another one is admitted


@dataclass(slots=True)
class Admitted:
    requests: list[Request] = field(default_factory=list)
    new: list[int] = field(default_factory=list)  # new tokens of each in this step
    loads: list[RowLoad] = field(default_factory=list)
    over: list[Request] = field(default_factory=list)  # nothing was left to compute: no row


class Admission:
    def __init__(
        self,
        *,
        cache: CacheManager,
        table: RowTable,
        running: Running,
        waiting: WaitingList,
        held: HeldRows,
        metrics: Metrics,
        clock: Callable[[], float],
        heals: Heals,
        log: AccessLog | None,
    ) -> None:
        self._log = log
        self._heals = heals
        self._cache = cache
        self._table = table
        self._running = running
        self._waiting = waiting
        self._held = held
        self._metrics = metrics
        self._clock = clock

    def admit(self, view: RowView, budget: int, now: float) -> Admitted:
        """`view`: the rows that run already; `budget`: new tokens that the step has left."""
        admitted, held_up = Admitted(), False
        prefilling = [self._running.requests[i] for i in view.within_prompt()] if self._cache.enabled else []
        for request in list(self._waiting.ordered(now)):  # who gives a row up changes the order
            if budget <= 0 or not (request.row >= 0 or self._find_row()):
                break
            if self._waiting.waits_for_siblings(request, now):
                continue
            if held_up and self._leaves_leases(request, now):
                continue
            prefix = self._cache.acquire(request.namespace, request.ids[: request.reusable])
            if any(self._will_share(request, prefix, other) for other in prefilling):
                self._cache.release(prefix)
                continue
            if prefix.length >= min(request.end, request.num_tokens):
                self._finish_at_once(request, prefix)
                admitted.over.append(request)
                continue
            drafts = int(self._heals.drafts(request))
            if not self._place(request, prefix, now, drafts=drafts):
                self._cache.release(prefix)
                if not self._leaves_leases(request, now):
                    break
                held_up = True  # by older programs: who belongs to none is not
                continue
            new = self._draft_boundary(request, prefix, budget, drafts)
            budget -= new
            admitted.requests.append(request)
            admitted.new.append(new)
            admitted.loads.append(_row_load(request))
            self._running.show_prompt(request, new)
            if self._cache.enabled and int(self._table.computed[request.row]) + new < request.num_prompt:
                prefilling.append(request)
        for request in [*admitted.requests, *admitted.over]:
            self._waiting.remove(request)
        return admitted

    def _find_row(self) -> bool:
        """A free row; held ones give way where more than half of all rows are held, or nothing else runs."""
        while not self._table.num_free:
            if len(self._running) and 2 * self._held.num_rows <= self._table.max_rows:
                return False
            if not self._held.release_youngest():
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

    def _draft_boundary(self, request: Request, prefix: Prefix, budget: int, drafts: int) -> int:
        """New tokens of a request that got its row, with the draft of its boundary where all fits in this step."""
        wanted = first_tokens(request, prefix.length)
        if drafts and wanted + drafts <= budget and request.completion is not None:
            self._table.draft(request, np.array([request.completion.healed_token], np.int32), assume=True)
            return wanted + drafts
        return min(budget, wanted)

    def _place(self, request: Request, prefix: Prefix, now: float, *, drafts: int = 0) -> bool:
        """A row and all pages of the known tokens, and of so many drafts. False (nothing changed) without room."""
        page = self._table.page_size
        needed = -(-(min(request.end, request.num_tokens) + drafts) // page) - prefix.length // page
        if len(self._running):
            growth = -(-_HEADROOM_TOKENS // page) * len(self._running)
            if self._cache.available - needed < min(growth, self._cache.num_pages // 4):
                return False
        pages = self._find_pages(request, needed, now)
        if pages is None:
            return False
        self._count(request, prefix)
        shared = self._cache.pages_of(prefix)
        if request.prefix is not None:  # of the row that it continues
            self._cache.release(request.prefix)
        request.prefix = prefix
        if request.row < 0:
            request.row = self._table.take()
        request.status = RequestStatus.RUNNING
        self._table.load(request, np.concatenate([shared, pages]), prefix.length)
        self._running.add(request)
        return True

    def _find_pages(self, request: Request, needed: int, now: float) -> IntArray | None:
        """Of what nobody needs, then of younger programs. Where nothing runs: of anybody."""
        since = request.job.since if self._leaves_leases(request, now) else None
        pages = self._cache.allocate(needed, now, since=since)
        began = request.job.since
        while pages is None and (
            self._held.release_youngest(after=began) or self.release_reserved(request, after=began)
        ):
            pages = self._cache.allocate(needed, now, since=since)
        while pages is None and not len(self._running):
            if since is not None:
                since = None
            elif not (self._held.release_youngest() or self.release_reserved(request)):
                break
            pages = self._cache.allocate(needed, now)
        return pages

    def _leaves_leases(self, request: Request, now: float) -> bool:
        """A program does not take what older ones will read again: it would have to be computed anew, and their end
        makes room. Those who belong to no program take it, and those who have waited for long."""
        return request.job.program is not None and not self._waiting.has_starved(request, now)

    def release_reserved(self, head: Request | None, *, after: float = -math.inf) -> bool:
        """The waiting request of the youngest program gives up the held row that it was to continue, and with it the
        lock on its prefix; it is admitted like any other. False where none but `head` has one whose program began
        `after` that moment."""
        waiting = self._waiting.ordered(self._clock())
        reserved = [r for r in waiting if r is not head and r.prefix is not None and r.job.since > after]
        if not reserved:
            return False
        self._give_up_reserved(max(reversed(reserved), key=lambda request: request.job.since))
        self._waiting.changed()
        return True

    def _give_up_reserved(self, request: Request) -> None:
        if request.prefix is not None:
            self._cache.release(request.prefix)
            request.prefix = None
        if request.row >= 0:
            self._table.give(request.row)
            request.row = -1

    def _finish_at_once(self, request: Request, prefix: Prefix) -> None:
        self._count(request, prefix)
        self._give_up_reserved(request)
        request.prefix = prefix
        request.status = RequestStatus.RUNNING  # without a row; whoever called schedule() ends it

    def _count(self, request: Request, prefix: Prefix) -> None:
        if request.admitted is None:  # what a retracted request finds again is its own work
            if self._log is not None:
                found = prefix.length if request.completion is not None or request.index == 0 else 0
                reads = request.reusable if request.completion is not None or request.index == 0 else 0
                request.access = self._log.add(request.tokens, num_read=reads, num_found=found)
            request.admitted = Moment(self._clock(), self._metrics.steps, self._metrics.step_s)
            if request.completion is not None:
                request.completion.cached_tokens = min(prefix.length, request.num_prompt)
            elif request.index == 0:
                request.job.cached_tokens = min(prefix.length, request.job.num_prompt)
        self._metrics.prompt_tokens += request.num_tokens
        self._metrics.cached_tokens += prefix.length
        if request.prefix is not None:
            self._metrics.resumptions += 1
        elif request.completion is not None or request.index == 0:  # a scoring's other rows come with its first
            self._metrics.admissions += 1


def first_tokens(request: Request, computed: int) -> int:
    """New tokens that a row with `computed` tokens wants. One with targets does not sample in the step that computes
    them: its last token waits for the next one."""
    return before_sample(request, computed, min(request.end, request.num_tokens) - computed)


def before_sample(request: Request, computed: int, new: int) -> int:
    """`new`, or less where the row would sample in a step that computes some of its targets."""
    targets = request.targets
    if targets is None or not request.samples or not len(targets.positions):
        return new
    last_target = int(targets.positions[-1])
    return min(new, last_target + 1 - computed) if computed <= last_target else new


def _row_load(request: Request) -> RowLoad:
    sampling = request.sampling
    prompt = request.ids[: request.num_prompt].copy() if sampling.repetition_penalty != 1.0 else None
    output = None
    if sampling.needs_counts and request.num_output:
        output = request.ids[request.num_prompt : request.num_tokens].copy()
    return RowLoad(request.row, sampling, prompt, output)
