"""The running rows as arrays, so that a step of many decoding rows is a few numpy calls and no loop.

Per row, with `computed <= length` except for one sampled token that the host has not seen:

    position   0 ........ computed ........ length ........ (length + in_flight)
               | KV done   | known tokens   | sampled, still on the device

A row wants min(length + in_flight, end) - computed new tokens. Where a token is in flight, everything known is
computed already, so the row's one new token is read on the device.

Where text is guessed to follow the token in flight (guesses.py), in_flight counts it too, and it stands in the row's
tokens behind that token's place, until the token is known.

Drafts stand in the row's tokens behind `length` until the step that verifies them. While that is under way the row
has computed more than it knows, so it wants nothing; the result sets `computed` back to what was accepted.

All numbers of a row stand side by side in one array: a step gathers its rows once (RowView) and writes them back once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from sglite.runtime.batch import DEVICE_TOKEN, NO_MASK, Batch, BoolArray, IntArray, PageUpdates, RowLoad, SharedPrefixes
from sglite.runtime.request import Request


class Flag(enum.IntFlag):
    """What a row is, as far as a step has to know."""

    SAMPLES = enum.auto()
    COMPUTES = enum.auto()  # the opposite: it ends when its tokens are computed
    MATCHER = enum.auto()
    LOGPROBS = enum.auto()
    TARGETS = enum.auto()
    PLAIN = enum.auto()  # a token that ends nothing only has to be stored (shown to the matcher, sent)
    STREAMS = enum.auto()
    STOPS = enum.auto()  # the model's stop ids end it


# Plain ints: an operation on an IntFlag costs a microsecond.
SAMPLES, COMPUTES, MATCHER, LOGPROBS = (int(f) for f in (Flag.SAMPLES, Flag.COMPUTES, Flag.MATCHER, Flag.LOGPROBS))
TARGETS, PLAIN, STREAMS, STOPS = (int(f) for f in (Flag.TARGETS, Flag.PLAIN, Flag.STREAMS, Flag.STOPS))

_FEW = 12  # rows up to which a loop is quicker than arrays
_NOBODY = np.empty(0, np.int32)
_COLUMNS = 11
_COMPUTED, _LENGTH, _IN_FLIGHT, _END, _PROMPT, _LIMIT, _NUM_PAGES, _MASKED_BELOW, _TENANT, _FLAGS, _DRAFTS = range(
    _COLUMNS
)


@dataclass(slots=True, eq=False)
class Step:
    """A batch and whose it is. `requests[i]` is row i of the batch; it may have ended by the time of the result."""

    batch: Batch
    requests: list[Request]
    tenants: IntArray  # [N] whose row each was: it is stale where the table says something else by now
    masked: IntArray  # [M] batch indices of rows whose draws need masks, one each,
    first_slots: IntArray  # [M] and the first mask slot of each
    targets: dict[int, tuple[int, int]] = field(default_factory=dict)  # batch index -> [lo, hi) of its Targets
    ended: list[int] = field(default_factory=list)  # batch indices of rows that only compute and are through
    assumed: list[int] = field(default_factory=list)  # batch indices of rows whose draft counts as confirmed till then
    dropped: set[Request] = field(default_factory=set)  # computed from wrong KV: their results count for nothing
    late: list[int] = field(default_factory=list)  # batch indices of rows without their mask: what they draw is dropped
    guesses: Mapping[Request, tuple[int, ...]] = field(default_factory=dict)  # text that rows enter behind a token in
    # flight, until that is known


class RowView:
    """The numbers of some rows at one moment. Columns are views of one gathered copy."""

    __slots__ = ("any_flags", "computed", "drafts", "flags", "in_flight", "numbers", "reachable", "rows")

    def __init__(self, table: RowTable, rows: IntArray) -> None:
        self.rows = rows
        numbers = self.numbers = table.numbers[rows]  # [N, columns]
        self.computed = numbers[:, _COMPUTED]
        self.in_flight = numbers[:, _IN_FLIGHT]
        self.reachable = numbers[:, _LENGTH] + self.in_flight
        self.flags = numbers[:, _FLAGS]
        self.drafts = numbers[:, _DRAFTS]
        self.any_flags = int(np.bitwise_or.reduce(self.flags)) if len(rows) else 0

    def wanted(self) -> IntArray:
        """New tokens that each row could compute now  # int32[N], >= 0"""
        wanted = np.minimum(self.reachable, self.numbers[:, _END])
        wanted += self.drafts
        wanted -= self.computed
        return np.maximum(wanted, 0, out=wanted)

    def within_prompt(self) -> list[int]:
        """Places of rows that have prompt tokens to compute."""
        return (self.computed < self.numbers[:, _PROMPT]).nonzero()[0].tolist()

    @property
    def has_free(self) -> bool:
        """Some row has no grammar."""
        return not int(np.bitwise_and.reduce(self.flags)) & MATCHER

    def draws_in_flight(self) -> list[bool]:
        """Of each row: it stands behind a draw of its grammar which is under way, and waits for nothing else."""
        ready = (self.flags & (PLAIN | MATCHER)) == PLAIN | MATCHER
        ready &= self.in_flight == 1
        ready &= self.computed == self.numbers[:, _LENGTH]
        return ready.tolist()

    def with_flag(self, flag: int) -> list[int]:
        """Places of rows that have it."""
        return (self.flags & flag).nonzero()[0].tolist() if self.any_flags & flag else []


class RowTable:
    def __init__(self, max_rows: int, max_len: int, page_size: int) -> None:
        self.max_rows = max_rows
        self.page_size = page_size
        self.numbers = np.zeros((max_rows, _COLUMNS), np.int32)
        self.computed = self.numbers[:, _COMPUTED]
        self.length = self.numbers[:, _LENGTH]
        self.in_flight = self.numbers[:, _IN_FLIGHT]  # 0 or 1 when a step is scheduled
        self.end = self.numbers[:, _END]
        self.prompt = self.numbers[:, _PROMPT]
        self.limit = self.numbers[:, _LIMIT]
        self.num_pages = self.numbers[:, _NUM_PAGES]
        self.masked_below = self.numbers[:, _MASKED_BELOW]  # length before which stop ids are masked
        self.tenant = self.numbers[:, _TENANT]  # a number that no two tenants share; 0: nobody
        self.flags = self.numbers[:, _FLAGS]
        # untouched parts of these two take no memory
        self.pages = np.zeros((max_rows, -(-max_len // page_size)), np.int32)
        self.tokens = np.zeros((max_rows, max_len), np.int32)  # a running request's ids are a view of its row
        self._no_drafts = np.zeros(max_rows, np.int32)
        self._loads = 0
        self._free = list(range(max_rows - 1, -1, -1))

    # -- tenants

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, row: int) -> None:
        self.tenant[row] = 0
        self._free.append(row)

    def load(self, request: Request, pages: IntArray, computed: int) -> None:
        """`request` becomes the tenant of request.row, with these pages from position 0 on."""
        row, completion = request.row, request.completion
        self._loads += 1
        request.assumed = 0
        self.tokens[row, : request.num_tokens] = request.tokens
        request.ids = self.tokens[row]
        self.pages[row, : len(pages)] = pages
        self.numbers[row] = 0
        self.tenant[row] = self._loads
        self.num_pages[row] = len(pages)
        self.computed[row] = computed
        self.end[row] = request.end
        self.limit[row] = request.limit
        self.prompt[row] = request.num_prompt
        flags = SAMPLES if request.samples else COMPUTES
        if request.targets is not None:
            flags |= TARGETS
        if completion is not None:
            flags |= STREAMS if completion.stream else 0
            flags |= STOPS if completion.stop_ids else 0
            flags |= LOGPROBS if completion.num_logprobs >= 0 else 0
        self.flags[row] = flags
        self.sync(request)

    def sync(self, request: Request) -> None:
        """The request's tokens or its matcher changed outside of `advance`."""
        row, completion = request.row, request.completion
        self.length[row] = request.num_tokens
        self.end[row], self.limit[row] = request.end, request.limit
        flags = int(self.flags[row]) & ~(MATCHER | PLAIN)
        if request.matcher is not None:
            flags |= MATCHER
        elif completion is not None and completion.stop_ids:
            self.masked_below[row] = request.num_prompt + completion.min_tokens
        if request.num_output and request.plain:  # its first token goes the long way
            flags |= PLAIN
        self.flags[row] = flags

    def settle(self, request: Request) -> None:
        """The opposite: what `advance` added is counted by the request too."""
        request.num_tokens = int(self.length[request.row]) - request.assumed

    def leave(self, request: Request) -> None:
        """The request keeps its tokens when its row goes to someone else."""
        self.settle(request)
        request.assumed = 0
        request.ids = request.tokens.copy()
        self.tenant[request.row] = 0

    def advance(self, rows: IntArray, tokens: IntArray) -> None:
        """One sampled token for each of these rows."""
        numbers = self.numbers[rows]
        self.tokens[rows, numbers[:, _LENGTH]] = tokens
        numbers[:, _LENGTH] += 1
        numbers[:, _IN_FLIGHT] -= 1
        self.numbers[rows] = numbers

    def postpone(self, step: Step) -> None:
        """The late rows of a step that is not sampled yet compute their tokens again in the next one."""
        rows = step.batch.rows[step.late]
        self.computed[rows] -= step.batch.num_new[step.late]
        self.in_flight[rows] -= 1

    def advance_by(self, rows: list[int], runs: list[tuple[int, ...]]) -> BoolArray:
        """Several known tokens for each of these rows, the first of which was sampled. Where another sample is under
        way, that is one of them: bool[rows], and it counts no more."""
        if len(rows) < _FEW:
            return np.array([self._advance_one_by(row, run) for row, run in zip(rows, runs, strict=True)])
        places = np.array(rows, np.int32)
        lengths = np.array([len(run) for run in runs], np.int32)
        numbers = self.numbers[places]
        ends = np.cumsum(lengths)
        columns = np.arange(int(ends[-1]), dtype=np.int32) + np.repeat(numbers[:, _LENGTH] - (ends - lengths), lengths)
        self.tokens[np.repeat(places, lengths), columns] = np.fromiter(
            chain.from_iterable(runs), np.int32, len(columns)
        )
        numbers[:, _LENGTH] += lengths
        ahead = numbers[:, _IN_FLIGHT] > 1
        numbers[:, _IN_FLIGHT] = 0
        numbers[ahead, _FLAGS] &= ~PLAIN  # what is under way is to be looked at
        self.numbers[places] = numbers
        return ahead

    def _advance_one_by(self, row: int, run: tuple[int, ...]) -> bool:
        numbers = self.numbers[row]
        length = int(numbers[_LENGTH])
        self.tokens[row, length : length + len(run)] = run
        numbers[_LENGTH] = length + len(run)
        ahead = bool(numbers[_IN_FLIGHT] > 1)
        numbers[_IN_FLIGHT] = 0
        if ahead:
            numbers[_FLAGS] &= ~PLAIN
        return ahead

    def guess(self, request: Request, run: tuple[int, ...]) -> None:
        """Text that the next step enters behind the token in flight, until `take_guesses` or `take_back`."""
        at = int(self.length[request.row]) + 1
        self.tokens[request.row, at : at + len(run)] = run
        self.in_flight[request.row] = 1 + len(run)

    def take_guesses(self, rows: list[int], tokens: IntArray, lengths: list[int]) -> None:
        """The tokens in flight are known, and the texts behind them (of these lengths) were guessed rightly. What the
        rows drew there is under way."""
        places = np.array(rows, np.int32)
        numbers = self.numbers[places]
        self.tokens[places, numbers[:, _LENGTH]] = tokens
        numbers[:, _LENGTH] += np.array(lengths, np.int32) + 1
        numbers[:, _IN_FLIGHT] = 1
        self.numbers[places] = numbers

    def take_back(self, request: Request) -> None:
        """What was guessed is wrong, or was not entered: only the one token is in flight. What a step under way
        computes of the row counts for nothing."""
        row = request.row
        self.computed[row] = self.length[row]
        self.in_flight[row] = 1
        self._loads += 1
        self.tenant[row] = self._loads

    def draft(self, request: Request, drafts: IntArray, *, assume: bool = False) -> None:
        """Tokens to verify in the next step, behind those that a row knows; none may be in flight. `assume`: from that
        step on they count as tokens of the row, until `confirm`."""
        at = int(self.length[request.row])
        self.tokens[request.row, at : at + len(drafts)] = drafts
        self.numbers[request.row, _DRAFTS] = len(drafts)
        request.assumed = len(drafts) if assume else 0

    def confirm(self, request: Request) -> None:
        """The step is over that verified what was assumed; its tokens are yet to be appended."""
        self.length[request.row] -= request.assumed
        request.assumed = 0
        self.settle(request)

    def rewind(self, request: Request) -> bool:
        """What was assumed is wrong: nothing behind the tokens that the request knows is computed. True where a sample
        that came of it is under way, whose result counts for nothing."""
        row = request.row
        self.computed[row] = request.num_tokens
        under_way = bool(self.in_flight[row])
        self.in_flight[row] = 0
        self._loads += 1
        self.tenant[row] = self._loads
        return under_way

    def plain_draws(self, step: Step, tokens: IntArray, is_stop: np.ndarray) -> tuple[BoolArray, IntArray, int]:
        """Which rows of the batch drew a token that only has to be stored  # bool[N]; the flags of all  # int32[N], and
        those that some have."""
        numbers = self.numbers[step.batch.rows]
        flags = numbers[:, _FLAGS]
        some = int(np.bitwise_or.reduce(flags))
        plain = numbers[:, _TENANT] == step.tenants
        plain &= numbers[:, _LENGTH] + 1 < numbers[:, _LIMIT]
        plain &= step.batch.samples
        if int(np.bitwise_and.reduce(flags)) & PLAIN == 0:
            plain &= (flags & PLAIN) != 0
        if some & STOPS:
            stops = is_stop[tokens]
            if np.logical_or.reduce(stops):
                plain &= ~(stops & ((flags & STOPS) != 0))
        return plain, flags, some

    def plain_masks(self, step: Step) -> BoolArray:
        """Of the step's masked rows, those that draw one token as their grammar alone says  # bool[M]"""
        rows = step.batch.rows[step.masked]
        numbers = self.numbers[rows]
        plain = (numbers[:, _FLAGS] & (PLAIN | MATCHER)) == PLAIN | MATCHER
        plain &= numbers[:, _TENANT] == step.tenants[step.masked]
        plain &= step.batch.num_drafts[step.masked] == 0
        return plain

    def owned_pages(self, request: Request) -> IntArray:
        """Pages of a row that do not belong to the tree  # a view"""
        assert request.prefix is not None
        first = request.prefix.length // self.page_size
        return self.pages[request.row, first : self.num_pages[request.row]]

    def known_computed(self, request: Request) -> int:
        """Tokens whose KV is computed or queued and whose ids the host knows."""
        return min(int(self.computed[request.row]), request.num_tokens)

    # -- steps

    def missing_pages(self, view: RowView, new: IntArray) -> IntArray:
        """Pages that each row lacks for `new` more tokens  # int32[N], >= 0"""
        needed = view.computed + new
        if self.page_size > 1:
            needed = -(-needed // self.page_size)
        missing = np.maximum(needed - view.numbers[:, _NUM_PAGES], 0)
        missing *= new != 0
        return missing

    def give_pages(self, view: RowView, missing: IntArray, pages: IntArray) -> PageUpdates:
        """Give each row of the view the next missing[i] >= 0 of `pages`."""
        short = missing > 0
        if np.logical_and.reduce(short):
            updates = self._add_pages(view.rows, missing, pages)
        else:
            updates = self._add_pages(view.rows[short], missing[short], pages)
        view.numbers[:, _NUM_PAGES] += missing
        return updates

    def _add_pages(self, rows: IntArray, missing: IntArray, pages: IntArray) -> PageUpdates:
        """Give rows[i] the next missing[i] >= 1 of `pages`."""
        columns = self.num_pages[rows]
        self.num_pages[rows] = columns + missing
        if len(pages) > len(rows):
            before = np.cumsum(missing) - missing
            columns = np.repeat(columns - before, missing) + np.arange(len(pages), dtype=np.int32)
            rows = np.repeat(rows, missing)
        self.pages[rows, columns] = pages
        return PageUpdates(rows, columns.astype(np.int32, copy=False), pages)

    def build(
        self,
        step: int,
        requests: list[Request],
        rows: IntArray,
        new: IntArray,
        *,
        loads: Sequence[RowLoad],
        page_updates: PageUpdates,
        shared_prefixes: SharedPrefixes = (),
        view: RowView | None = None,
    ) -> Step:
        """The batch in which rows[i] (of requests[i]) computes new[i] >= 1 tokens; the table moves on by it. `view`: of
        these rows as they are now, where there is one; not to be used afterwards."""
        view = view or RowView(self, rows)
        numbers, reachable = view.numbers, view.reachable
        starts = view.computed.copy()
        ends = starts + new
        samples = ends == reachable + view.drafts
        if view.any_flags & COMPUTES:
            samples &= (view.flags & SAMPLES) != 0
        num_logits = samples.astype(np.int32)
        num_drafts = self._no_drafts[: len(rows)]
        assumed: list[int] = []
        if np.logical_or.reduce(view.drafts):
            num_drafts = view.drafts * samples
            num_logits += num_drafts
            assumed = [i for i in np.flatnonzero(num_drafts).tolist() if requests[i].assumed]
        any_scored = view.any_flags & (TARGETS | COMPUTES)
        scored = self._score(requests, view, starts, ends, num_logits) if any_scored else _Scored()
        masks = reachable < numbers[:, _MASKED_BELOW]
        if view.any_flags & MATCHER:
            masks |= (view.flags & MATCHER) != 0
        masks &= samples
        masked, first_slots, mask_slots = _mask_slots(masks, num_logits, num_drafts)
        logprob_rows = scored.logprob_rows
        if view.any_flags & LOGPROBS:
            logprob_rows = sorted({*logprob_rows, *np.flatnonzero(samples & ((view.flags & LOGPROBS) != 0)).tolist()})
        output_index = reachable - numbers[:, _PROMPT]
        output_index *= samples
        batch = Batch(
            step=step,
            rows=rows,
            starts=starts,
            num_new=new,
            token_ids=self._token_ids(view, starts, new),
            num_logits=num_logits,
            samples=samples,
            num_drafts=num_drafts,
            output_index=output_index,
            mask_slots=mask_slots,
            logprob_rows=np.array(logprob_rows, np.int32) if logprob_rows else _NOBODY,
            target_ids=scored.target_ids,
            target_positions=scored.target_positions,
            loads=tuple(loads),
            page_updates=page_updates,
            shared_prefixes=shared_prefixes,
        )
        tenants = numbers[:, _TENANT].copy()
        numbers[:, _COMPUTED] = ends
        numbers[:, _IN_FLIGHT] += samples
        numbers[:, _DRAFTS] = 0
        numbers[assumed, _LENGTH] += num_drafts[assumed]
        self.numbers[rows] = numbers
        return Step(batch, requests, tenants, masked, first_slots, scored.ranges, scored.ended, assumed=assumed)

    def _token_ids(self, view: RowView, starts: IntArray, new: IntArray) -> IntArray:
        """Row after row  # int32[sum(new)]. A token that is in flight is read on the device."""
        if np.maximum.reduce(new) == 1:
            return np.where(view.in_flight > 0, np.int32(DEVICE_TOKEN), self.tokens[view.rows, starts])
        offsets = np.cumsum(new) - new
        positions = np.arange(int(new.sum())) + np.repeat(starts - offsets, new)
        token_ids = self.tokens[np.repeat(view.rows, new), positions]
        token_ids[offsets[view.in_flight > 0]] = DEVICE_TOKEN
        return token_ids

    def _score(
        self, requests: list[Request], view: RowView, starts: IntArray, ends: IntArray, num_logits: IntArray
    ) -> _Scored:
        """Rows with targets: which of them lie in this step; writes their num_logits."""
        scored = _Scored()
        for i in view.with_flag(TARGETS | COMPUTES):
            request, start, end = requests[i], int(starts[i]), int(ends[i])
            if not request.samples and end >= request.end:
                scored.ended.append(i)
            targets = request.targets
            if targets is None:
                continue
            lo, hi = np.searchsorted(targets.positions, (start, end)).tolist()
            if lo == hi:
                continue
            first = int(targets.positions[lo])
            assert num_logits[i] == 0, "a row does not sample in a step that computes its targets"
            num_logits[i] = end - first
            scored.ranges[i] = (lo, hi)
            scored.target_ids[i] = targets.ids[lo:hi]
            scored.target_positions[i] = targets.positions[lo:hi] - np.int32(first)
            if targets.num_top:
                scored.logprob_rows.append(i)
        return scored


@dataclass(slots=True)
class _Scored:
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    target_ids: dict[int, IntArray] = field(default_factory=dict)
    target_positions: dict[int, IntArray] = field(default_factory=dict)
    logprob_rows: list[int] = field(default_factory=list)


def _mask_slots(masks: np.ndarray, num_logits: IntArray, num_drafts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The batch indices of the rows to mask, the first slot of each, and the slot of each logits position. A row draws
    at its last 1 + num_drafts positions."""
    if np.logical_and.reduce(masks) and int(np.add.reduce(num_logits)) == len(masks):  # a draw each, all under masks
        every = np.arange(len(masks), dtype=np.int32)
        return every, every, every.copy()
    indices = masks.nonzero()[0].astype(np.int32)
    mask_slots = np.empty(int(np.add.reduce(num_logits)), np.int32)
    mask_slots.fill(NO_MASK)
    if not len(indices):
        return indices, indices, mask_slots
    one_each = len(mask_slots) == len(masks) and not np.logical_or.reduce(num_drafts)
    if one_each and np.logical_and.reduce(num_logits):  # as mostly
        mask_slots[indices] = first_slots = np.arange(len(indices), dtype=np.int32)
        return indices, first_slots, mask_slots
    draws = 1 + num_drafts[indices]
    first_slots = np.cumsum(draws, dtype=np.int32) - draws
    total = int(draws.sum())
    within = np.arange(total) - np.repeat(first_slots, draws)
    first_places = np.cumsum(num_logits)[indices] - draws
    mask_slots[np.repeat(first_places, draws) + within] = np.arange(total, dtype=np.int32)
    return indices, first_slots, mask_slots
