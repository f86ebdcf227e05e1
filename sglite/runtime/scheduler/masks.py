"""Which tokens each draw of a step may give, written into the executor's mask buffer while the forward runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglite.grammar.matcher import BatchFiller, Bitmask, Matcher
from sglite.runtime.request import Request
from sglite.runtime.scheduler.rows import Step


def allow(row: Bitmask, token_ids: Iterable[int]) -> None:
    """Set bits of one mask row  # int32[words]"""
    bits = row.view(np.uint32)
    for token_id in token_ids:
        bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def forbid(row: Bitmask, token_ids: Iterable[int]) -> None:
    """Clear bits of one mask row  # int32[words]"""
    bits = row.view(np.uint32)
    for token_id in token_ids:
        bits[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFF_FFFF)


def fill_masks(step: Step, buffer: Bitmask, filler: BatchFiller | None) -> dict[Request, Exception]:
    """Fill the rows of `buffer` that the step names. Returns the requests whose mask failed; their rows allow
    everything, since what they draw is dropped."""
    matchers: list[Matcher] = []
    slots: list[int] = []
    owners: list[Request] = []
    for i, slot in step.masked:
        request = step.requests[i]
        if request.finished or request in step.dropped:
            buffer[slot].fill(-1)
        elif request.num_ahead:  # forced: the token is in the request already, and nothing else may be drawn
            buffer[slot].fill(0)
            allow(buffer[slot], (int(request.ids[request.num_prompt + int(step.batch.output_index[i])]),))
        elif request.matcher is None:
            assert request.completion is not None
            buffer[slot].fill(-1)
            if step.batch.output_index[i] < request.completion.min_tokens:
                forbid(buffer[slot], request.completion.stop_ids)
        else:
            matchers.append(request.matcher)
            slots.append(slot)
            owners.append(request)
    if not matchers:
        return {}
    assert filler is not None
    failures = filler.fill(matchers, slots, buffer)
    for slot, request in zip(slots, owners, strict=True):
        if request.completion is not None and request.completion.extra_stop_ids:
            _settle_extra_stops(buffer[slot], request)
    for i in failures:
        buffer[slots[i]].fill(-1)
    return {owners[i]: error for i, error in failures.items()}


def _settle_extra_stops(row: Bitmask, request: Request) -> None:
    """A request's own stop ids are legal exactly where the text is complete; where they are the only way on, they
    are the grammar's text."""
    assert request.completion is not None
    assert request.matcher is not None
    extra = request.completion.extra_stop_ids
    if request.matcher.can_stop:
        allow(row, extra)
        return
    before = row.copy()
    forbid(row, extra)
    if not row.any():
        row[:] = before
