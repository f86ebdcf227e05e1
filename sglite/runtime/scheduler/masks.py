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
    failed: dict[Request, Exception] = {}
    for i, slot in step.masked:
        request = step.requests[i]
        drafts = int(step.batch.num_drafts[i])
        if request.finished or request in step.dropped:
            buffer[slot : slot + 1 + drafts].fill(-1)
        elif request.num_ahead:  # forced: the token is in the request already, and nothing else may be drawn
            buffer[slot].fill(0)
            allow(buffer[slot], (int(request.ids[request.num_prompt + int(step.batch.output_index[i])]),))
        elif request.matcher is None:
            _ban_stops(buffer[slot : slot + 1 + drafts], request, int(step.batch.output_index[i]))
        elif drafts:
            error = _fill_drafted(buffer[slot : slot + 1 + drafts], request)
            if error is not None:
                failed[request] = error
        else:
            matchers.append(request.matcher)
            slots.append(slot)
            owners.append(request)
    if not matchers:
        return failed
    assert filler is not None
    failures = _fill_together(matchers, slots, buffer, filler)
    for slot, request in zip(slots, owners, strict=True):
        _settle_extra_stops(buffer[slot], request)
    for i, error in failures.items():
        buffer[slots[i]].fill(-1)
        failed[owners[i]] = error
    return failed


def _fill_together(
    matchers: list[Matcher], slots: list[int], buffer: Bitmask, filler: BatchFiller
) -> dict[int, Exception]:
    """Failures by place. Where the filler itself fails, one by one, so that the others go on."""
    try:
        return filler.fill(matchers, slots, buffer)
    except Exception as error:  # noqa: BLE001 - a grammar engine may raise anything; it ends its own request
        if len(matchers) == 1:
            return {0: error}
    failures: dict[int, Exception] = {}
    for i, (matcher, slot) in enumerate(zip(matchers, slots, strict=True)):
        for error in _fill_together([matcher], [slot], buffer, filler).values():
            failures[i] = error
    return failures


def _ban_stops(rows: Bitmask, request: Request, output_index: int) -> None:
    """No grammar: stop ids are forbidden before min_tokens  # rows: int32[draws, words]"""
    assert request.completion is not None
    rows.fill(-1)
    for k, row in enumerate(rows):
        if output_index + k < request.completion.min_tokens:
            forbid(row, request.completion.stop_ids)


def _fill_drafted(rows: Bitmask, request: Request) -> Exception | None:
    """The mask before each draft and after the last one  # rows: int32[1 + drafts, words]. The matcher stays."""
    matcher = request.matcher
    assert matcher is not None
    drafts = request.ids[request.num_tokens : request.num_tokens + len(rows) - 1].tolist()
    accepted = 0
    error: Exception | None = None
    try:
        for k, row in enumerate(rows):
            matcher.fill(row)
            _settle_extra_stops(row, request)
            if k < len(drafts):
                accepted += matcher.accept((drafts[k],))
        matcher.rollback(accepted)
    except Exception as caught:  # noqa: BLE001 - as above
        rows.fill(-1)
        error = caught
    return error


def _settle_extra_stops(row: Bitmask, request: Request) -> None:
    """A request's own stop ids are legal exactly where the text is complete; where they are the only way on, they
    are the grammar's text."""
    assert request.completion is not None
    assert request.matcher is not None
    extra = request.completion.extra_stop_ids
    if not extra:
        return
    if request.matcher.can_stop:
        allow(row, extra)
        return
    before = row.copy()
    forbid(row, extra)
    if not row.any():
        row[:] = before
