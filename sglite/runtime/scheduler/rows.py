"""The running rows as arrays, so that a step of many decoding rows is a few numpy calls and no loop.

Per row, with `computed <= length` except for one sampled token that the host has not seen:

    position   0 ........ computed ........ length ........ (length + in_flight)
               | KV done   | known tokens   | sampled, still on the device

A row wants min(length + in_flight, end) - computed new tokens. Where a token is in flight, everything known is
computed already, so the row's one new token is read on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglite.runtime.batch import DEVICE_TOKEN, NO_MASK, Batch, BoolArray, IntArray, PageUpdates, RowLoad
from sglite.runtime.request import Request


@dataclass(slots=True, eq=False)
class Step:
    """A batch and whose it is. `requests[i]` is row i of the batch; it may have ended by the time of the result."""

    batch: Batch
    requests: list[Request]
    masked: list[tuple[int, int]]  # (batch index, mask slot) of draws that need a mask
    targets: dict[int, tuple[int, int]] = field(default_factory=dict)  # batch index -> [lo, hi) of its Targets
    ended: list[int] = field(default_factory=list)  # batch indices of rows that only compute and are through
    dropped: set[Request] = field(default_factory=set)  # computed from wrong KV: their results count for nothing


class RowTable:
    def __init__(self, max_rows: int, max_len: int, page_size: int) -> None:
        self.max_rows = max_rows
        self.page_size = page_size
        self.max_pages = -(-max_len // page_size)
        self.pages = np.zeros((max_rows, self.max_pages), np.int32)  # untouched parts take no memory
        self.num_pages = np.zeros(max_rows, np.int32)
        self.computed = np.zeros(max_rows, np.int32)
        self.length = np.zeros(max_rows, np.int32)
        self.in_flight = np.zeros(max_rows, np.int32)  # 0 or 1 when a step is scheduled
        self.end = np.zeros(max_rows, np.int32)
        self.prompt = np.zeros(max_rows, np.int32)
        self.last_token = np.zeros(max_rows, np.int32)
        self.samples = np.zeros(max_rows, np.bool_)
        self.constrained = np.zeros(max_rows, np.bool_)  # has a matcher
        self.masked_below = np.zeros(max_rows, np.int32)  # length before which stop ids are masked
        self.wants_logprobs = np.zeros(max_rows, np.bool_)
        self.has_targets = np.zeros(max_rows, np.bool_)
        self._free = list(range(max_rows - 1, -1, -1))

    # -- tenants

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, row: int) -> None:
        self._free.append(row)

    def load(self, request: Request, pages: IntArray, computed: int) -> None:
        """`request` becomes the tenant of request.row, with these pages from position 0 on."""
        row = request.row
        self.pages[row, : len(pages)] = pages
        self.num_pages[row] = len(pages)
        self.computed[row] = computed
        self.in_flight[row] = 0
        self.end[row] = request.end
        self.prompt[row] = request.num_prompt
        self.samples[row] = request.samples
        completion = request.completion
        self.constrain(request)
        self.wants_logprobs[row] = completion is not None and completion.num_logprobs >= 0
        self.has_targets[row] = request.targets is not None
        self.sync(request)

    def constrain(self, request: Request) -> None:
        """The request's matcher came or went."""
        row, completion = request.row, request.completion
        self.constrained[row] = request.matcher is not None
        bans = completion is not None and request.matcher is None and completion.stop_ids
        self.masked_below[row] = request.num_prompt + completion.min_tokens if completion and bans else 0

    def sync(self, request: Request) -> None:
        """The request's known tokens changed by more than a step's one."""
        self.length[request.row] = request.num_tokens
        if request.num_tokens:
            self.last_token[request.row] = request.ids[request.num_tokens - 1]

    def owned_pages(self, request: Request) -> IntArray:
        """Pages of a row that do not belong to the tree  # a view"""
        assert request.prefix is not None
        first = request.prefix.length // self.page_size
        return self.pages[request.row, first : self.num_pages[request.row]]

    def known_computed(self, request: Request) -> int:
        """Tokens whose KV is computed or queued and whose ids the host knows."""
        return min(int(self.computed[request.row]), request.num_tokens)

    # -- steps

    def wanted(self, rows: IntArray) -> IntArray:
        """New tokens that each row could compute now  # int32[len(rows)], >= 0"""
        reachable = self.length[rows] + self.in_flight[rows]
        return np.minimum(reachable, self.end[rows]) - self.computed[rows]

    def missing_pages(self, rows: IntArray, new: IntArray) -> IntArray:
        """Pages that each row lacks for `new` more tokens  # int32[len(rows)], >= 0"""
        needed = self.computed[rows] + new
        if self.page_size > 1:
            needed = -(-needed // self.page_size)
        return np.where(new > 0, np.maximum(needed - self.num_pages[rows], 0), 0)

    def add_pages(self, rows: IntArray, missing: IntArray, pages: IntArray) -> PageUpdates:
        """Give rows[i] the next missing[i] of `pages`."""
        if len(pages) == len(rows):  # one each: the step of decoding rows
            at_rows, columns = rows, self.num_pages[rows]
        else:
            at_rows = np.repeat(rows, missing)
            before = np.cumsum(missing) - missing
            columns = self.num_pages[at_rows] + np.arange(len(pages), dtype=np.int32) - np.repeat(before, missing)
        self.pages[at_rows, columns] = pages
        self.num_pages[rows] += missing
        return PageUpdates(at_rows, columns.astype(np.int32, copy=False), pages)

    def build(
        self,
        step: int,
        requests: list[Request],
        rows: IntArray,
        new: IntArray,
        *,
        loads: Sequence[RowLoad],
        page_updates: PageUpdates,
    ) -> Step:
        """The batch in which rows[i] (of requests[i]) computes new[i] >= 1 tokens; the table moves on by it."""
        starts = self.computed[rows]
        in_flight = self.in_flight[rows]
        reachable = self.length[rows] + in_flight
        ends = starts + new
        samples: BoolArray = (ends == reachable) & self.samples[rows]
        num_logits = samples.astype(np.int32)
        index = reachable - self.prompt[rows]
        masks = samples & (self.constrained[rows] | (reachable < self.masked_below[rows]))
        logprobs = samples & self.wants_logprobs[rows]

        result = Step(None, requests, [])  # type: ignore[arg-type]
        target_ids: dict[int, IntArray] = {}
        target_positions: dict[int, IntArray] = {}
        if self.has_targets[rows].any() or not self.samples[rows].all():
            for i in np.flatnonzero(self.has_targets[rows] | ~self.samples[rows]).tolist():
                request, end = requests[i], int(ends[i])
                if end >= request.end and not request.samples:
                    result.ended.append(i)
                chunk = _targets_of(request, int(starts[i]), end)
                if chunk is None:
                    continue
                (lo, hi), first = chunk
                targets = request.targets
                assert targets is not None
                assert not samples[i]
                result.targets[i] = (lo, hi)
                num_logits[i] = end - first
                target_ids[i] = targets.ids[lo:hi]
                target_positions[i] = targets.positions[lo:hi] - np.int32(first)
                logprobs[i] = targets.num_top > 0

        mask_slots = np.full(int(num_logits.sum()), NO_MASK, np.int32)
        if masks.any():
            indices = np.flatnonzero(masks)
            mask_slots[(np.cumsum(num_logits) - 1)[indices]] = np.arange(len(indices), dtype=np.int32)
            result.masked = [(i, slot) for slot, i in enumerate(indices.tolist())]

        result.batch = Batch(
            step=step,
            rows=rows,
            starts=starts,
            num_new=new,
            token_ids=self._token_ids(requests, rows, starts, new, in_flight),
            num_logits=num_logits,
            samples=samples,
            num_drafts=np.zeros(len(rows), np.int32),
            output_index=np.where(samples, index, 0).astype(np.int32, copy=False),
            mask_slots=mask_slots,
            logprob_rows=np.flatnonzero(logprobs).astype(np.int32),
            target_ids=target_ids,
            target_positions=target_positions,
            loads=tuple(loads),
            page_updates=page_updates,
        )
        self.computed[rows] = ends
        self.in_flight[rows] = in_flight + samples
        return result

    def _token_ids(
        self, requests: list[Request], rows: IntArray, starts: IntArray, new: IntArray, in_flight: IntArray
    ) -> IntArray:
        """Row after row  # int32[sum(new)]"""
        last = np.where(in_flight > 0, np.int32(DEVICE_TOKEN), self.last_token[rows])
        simple = (new == 1) & ((in_flight > 0) | (starts == self.length[rows] - 1))
        if simple.all():
            return last
        token_ids = np.empty(int(new.sum()), np.int32)
        offsets = np.cumsum(new) - new
        token_ids[offsets[simple]] = last[simple]
        for i in np.flatnonzero(~simple).tolist():
            start, n, at = int(starts[i]), int(new[i]), int(offsets[i])
            token_ids[at : at + n] = requests[i].ids[start : start + n]
        return token_ids


def _targets_of(request: Request, start: int, end: int) -> tuple[tuple[int, int], int] | None:
    """([lo, hi) of the request's targets within positions start .. end, position of the first), None without any."""
    targets: NDArray[np.int32] | None = None if request.targets is None else request.targets.positions
    if targets is None:
        return None
    lo, hi = np.searchsorted(targets, (start, end)).tolist()
    return ((lo, hi), int(targets[lo])) if lo < hi else None
