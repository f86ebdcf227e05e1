"""Which tokens each draw of a step may give, told to the executor while the forward runs.

A mask is either written into the step's buffer or, where rows have it in common (`SharedMask`), named by its place in
the executor's memory of masks. A shared mask that is not there yet is written like any other and kept there.

Masks that only an engine can tell are made in other threads. A row whose mask is not there when the device has come to
the end of the forward is late: it draws without one, the token is dropped, and the next step computes the row's last
token again and draws then. The others wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sglite.grammar.matcher import BatchFiller, Bitmask, MaskAsker, MaskSharer, Matcher, SharedMask
from sglite.runtime.batch import NO_MASK, BoolArray, IntArray
from sglite.runtime.request import Request
from sglite.runtime.scheduler.rows import Step

_SEVERAL = 4  # rows from which on looking at all at once is quicker than one by one
_MOST_SMALL = 1024  # masks of few tokens that are remembered
_LOOK_AGAIN_S = 0.0001  # how often it is asked whether the device has come to the end
_UNTIL_DONE_S = 60.0

Bound = tuple[int, int, int, Request]  # (batch index, row of the buffer, place of the draw, request) with a matcher


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


class MaskMemory:
    """Which shared masks the executor keeps, and where. When it is full, the eighth that was used longest ago goes."""

    def __init__(self, places: int) -> None:
        self._kept: list[SharedMask | None] = [None] * places
        self._free = list(range(places))
        self.now = 0  # steps

    def knows(self, mask: SharedMask) -> bool:
        """Then `mask.place` is its place; and it is used now."""
        if mask.keeper is not self:
            return False
        mask.used = self.now
        return True

    def keep(self, mask: SharedMask) -> bool:
        """Give a mask a place; False where all hold masks of this step."""
        if not self._free:
            self._make_room()
        if not self._free:
            return False
        mask.keeper, mask.place, mask.used = self, self._free.pop(), self.now
        self._kept[mask.place] = mask
        return True

    def _make_room(self) -> None:
        old = sorted((mask.used, mask.place) for mask in self._kept if mask is not None and mask.used < self.now)
        for _, place in old[: max(1, len(self._kept) // 8)]:
            mask = self._kept[place]
            if mask is not None:
                mask.keeper = None
            self._kept[place] = None
            self._free.append(place)


class MaskFiller:
    """`filler` None: no row has a matcher. `places`: of the executor's memory of masks, behind `rows` of its buffer.
    `asks`: the filler makes masks in other threads, if it can."""

    def __init__(self, filler: BatchFiller | None, *, rows: int, places: int, asks: bool = False) -> None:
        self._filler = filler
        self._asker = filler if asks and isinstance(filler, MaskAsker) else None
        self._sharer = filler if isinstance(filler, MaskSharer) else None
        self._namer = self._sharer if places else None
        self._rows = rows
        self._memory = MaskMemory(places)
        self._single: dict[int, SharedMask] = {}
        self._without: dict[frozenset[int], SharedMask] = {}

    def names(self, step: Step) -> bool:
        """Whether remembered masks are found for all rows at once; `fill` needs RowTable.plain_masks for that."""
        return self._namer is not None and len(step.masked) >= _SEVERAL

    def fill(
        self, step: Step, buffer: Bitmask, plain: BoolArray | None, *, over: Callable[[], bool] | None = None
    ) -> dict[Request, Exception]:
        """Give each row that the step names its masks. Returns the requests whose mask failed; their rows allow
        everything, since what they draw is dropped. `plain`: see `names`. `over`: the device waits for the masks; from
        then on rows may be late (`Step.late`). None: never."""
        self._memory.now += 1
        ends = np.cumsum(step.batch.num_logits, dtype=np.int32) - 1  # place of each row's last draw
        left: Sequence[int] = range(len(step.masked))
        if self._namer is not None:
            if plain is None:
                left = self._name_few(self._namer, step, ends)
            elif plain.any():
                left = self._name_known(self._namer, step, plain, ends)
        return self._fill(step, left, ends, buffer, over) if left else {}

    def _name_known(self, sharer: MaskSharer, step: Step, plain: BoolArray, ends: IntArray) -> Sequence[int]:
        """All rows at once whose mask is remembered. Returns the places of the others."""
        memory, requests, batch = self._memory, step.requests, step.batch
        chosen = step.masked if plain.all() else step.masked[plain]
        masks = sharer.known([requests[i].matcher for i in chosen.tolist()])  # type: ignore[misc]
        places = [-1 if mask is None or mask.keeper is not memory else mask.place for mask in masks]
        for mask in set(masks):
            if mask is not None:
                memory.knows(mask)
        found = np.array(places, np.int32)
        if found.min() >= 0:
            batch.mask_slots[ends[chosen]] = found + np.int32(self._rows)
            return () if len(chosen) == len(plain) else np.flatnonzero(~plain).tolist()
        there = found >= 0
        batch.mask_slots[ends[chosen[there]]] = found[there] + np.int32(self._rows)
        left = ~plain
        left[plain] = ~there
        return np.flatnonzero(left).tolist()

    def _name_few(self, sharer: MaskSharer, step: Step, ends: IntArray) -> list[int]:
        """The same, one by one."""
        left: list[int] = []
        for k, i in enumerate(step.masked.tolist()):
            request = step.requests[i]
            matcher = request.matcher
            mask: SharedMask | None = None
            over = request.finished or request in step.dropped
            if matcher is not None and request.plain and not (over or step.batch.num_drafts[i]):
                (mask,) = sharer.known((matcher,))
            if mask is not None and self._memory.knows(mask):
                step.batch.mask_slots[ends[i]] = self._rows + mask.place
            else:
                left.append(k)
        return left

    def _fill(
        self,
        step: Step,
        left: Sequence[int],
        ends: IntArray,
        buffer: Bitmask,
        over: Callable[[], bool] | None,
    ) -> dict[Request, Exception]:
        """The rows `left` of step.masked."""
        batch, failed, requests = step.batch, {}, step.requests
        places, drafts = ends.tolist(), batch.num_drafts.tolist()
        healed = set(step.assumed)
        shared: list[tuple[int, int, SharedMask]] = []  # (row of the buffer, place of the draw, mask)
        bound: list[Bound] = []
        for k in left:
            i, slot = int(step.masked[k]), int(step.first_slots[k])
            request = requests[i]
            if request.finished or request in step.dropped:
                batch.mask_slots[places[i] - drafts[i] : places[i] + 1] = NO_MASK
            elif request.num_ahead:  # forced: the token is in the request already, and nothing else may be drawn
                token_id = int(request.ids[request.num_prompt + int(batch.output_index[i])])
                shared.append((slot, places[i], self._only(token_id, buffer)))
            elif i in healed:  # behind the boundary everything is legal
                batch.mask_slots[places[i]] = NO_MASK
                bound.append((i, slot, places[i] - drafts[i], request))
            elif drafts[i]:
                rows = buffer[slot : slot + 1 + drafts[i]]
                if request.matcher is None:
                    _ban_stops(rows, request, int(batch.output_index[i]))
                elif (error := _fill_drafted(rows, request)) is not None:
                    failed[request] = error
            elif request.matcher is not None:
                bound.append((i, slot, places[i], request))
            elif (mask := self._no_stops(request, int(batch.output_index[i]), buffer)) is not None:
                shared.append((slot, places[i], mask))
            else:
                batch.mask_slots[places[i]] = NO_MASK
        if bound and self._asker is not None:
            bound = self._ask(self._asker, step, bound, over)
        if bound:
            shared += self._fill_bound(bound, buffer, failed)
        self._place(shared, step, buffer)
        return failed

    def _ask(self, asker: MaskAsker, step: Step, bound: list[Bound], over: Callable[[], bool] | None) -> list[Bound]:
        """Have masks made that only an engine can tell. Returns the rows whose mask is there; the others are late."""
        num_draws = int(step.batch.samples.sum())
        matchers = [request.matcher for _, _, _, request in bound if request.matcher is not None]
        asked = asker.begin(matchers, alone=num_draws == 1)
        if not asked:
            return bound
        while late := {place for place, ask in asked.items() if not ask.done}:
            may = over is not None and len(late) < num_draws and all(_may_be_late(step, bound[place]) for place in late)
            if may and over is not None and over():
                break
            asker.wait([asked[place] for place in late], _LOOK_AGAIN_S if may else _UNTIL_DONE_S)
        asker.wait((), 0.0)  # what has come is looked at, also where nobody had to wait
        for place in late:
            i, _, draw, _ = bound[place]
            step.batch.mask_slots[draw] = NO_MASK
            step.late.append(i)
        return [one for place, one in enumerate(bound) if place not in late]

    def _fill_bound(
        self, bound: list[Bound], buffer: Bitmask, failed: dict[Request, Exception]
    ) -> list[tuple[int, int, SharedMask]]:
        """The masks of matchers; the shared ones are returned, the others written."""
        assert self._filler is not None
        matchers = [request.matcher for _, _, _, request in bound if request.matcher is not None]
        masks, failures = self._shared(matchers)
        found: list[tuple[int, int, SharedMask]] = []
        rest: list[int] = []
        for i, ((_, slot, place, request), mask) in enumerate(zip(bound, masks, strict=True)):
            assert request.completion is not None
            if mask is not None and not request.completion.extra_stop_ids:
                found.append((slot, place, mask))
            elif mask is not None:
                buffer[slot] = mask.words
                _settle_extra_stops(buffer[slot], request)
            elif i not in failures:
                rest.append(i)
        if rest:
            slots = [bound[i][1] for i in rest]
            own = _fill_together([matchers[i] for i in rest], slots, buffer, self._filler)
            for i in rest:
                _settle_extra_stops(buffer[bound[i][1]], bound[i][3])
            failures |= {rest[k]: error for k, error in own.items()}
        for i, error in failures.items():
            _, slot, _, request = bound[i]
            buffer[slot].fill(-1)
            failed[request] = error
        return found

    def _shared(self, matchers: Sequence[Matcher]) -> tuple[Sequence[SharedMask | None], dict[int, Exception]]:
        if self._sharer is None:
            return [None] * len(matchers), {}
        try:
            return self._sharer.shared(matchers)
        except Exception:  # noqa: BLE001 - a grammar engine may raise anything; filling one by one tells whose it is
            return [None] * len(matchers), {}

    def _place(self, shared: list[tuple[int, int, SharedMask]], step: Step, buffer: Bitmask) -> None:
        """Name the masks that are remembered; write the others, and have them remembered."""
        memory, rows = self._memory, self._rows
        draws: list[int] = []
        found: list[int] = []
        written: dict[SharedMask, int] = {}  # that there was no place for
        for slot, place, mask in shared:
            draws.append(place)
            if memory.knows(mask):
                found.append(rows + mask.place)
            elif mask in written:
                found.append(written[mask])
            else:
                buffer[slot] = mask.words
                if memory.keep(mask):
                    step.batch.kept_masks.append((slot, mask.place))
                    found.append(rows + mask.place)
                else:
                    found.append(written.setdefault(mask, slot))
        if draws:
            step.batch.mask_slots[draws] = found

    def _only(self, token_id: int, buffer: Bitmask) -> SharedMask:
        found = self._single.get(token_id)
        if found is None:
            if len(self._single) >= _MOST_SMALL:
                self._single.clear()
            row = np.zeros(buffer.shape[1], np.int32)
            allow(row, (token_id,))
            found = self._single[token_id] = SharedMask(row)
        return found

    def _no_stops(self, request: Request, output_index: int, buffer: Bitmask) -> SharedMask | None:
        """No grammar: stop ids are forbidden before min_tokens."""
        completion = request.completion
        assert completion is not None
        if output_index >= completion.min_tokens:
            return None
        found = self._without.get(completion.stop_ids)
        if found is None:
            if len(self._without) >= _MOST_SMALL:
                self._without.clear()
            row = np.full(buffer.shape[1], -1, np.int32)
            forbid(row, completion.stop_ids)
            found = self._without[completion.stop_ids] = SharedMask(row)
        return found


def _may_be_late(step: Step, bound: Bound) -> bool:
    """The row's new tokens are of its own output, so that computing them again changes nothing that others read; and a
    token that is drawn and dropped leaves no trace."""
    i, _, _, request = bound
    batch = step.batch
    return int(batch.num_new[i]) <= int(batch.output_index[i]) and not request.sampling.needs_counts


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
