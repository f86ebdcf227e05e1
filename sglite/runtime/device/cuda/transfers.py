"""Copies between host and GPU that nobody waits for at once, and that cost the host little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.device.base import SampleFlags, SamplePlan
from sglite.runtime.device.cuda.inputs import PinnedRing, Sections

_LAYOUTS = 1024  # kept; a layout is made again when it is needed again
_FEW_MASKS = 6  # up to that many are copied one by one
RESULT_WORDS = 1 << 16  # of the ring for results: 256 KiB

_ALWAYS = ("logits_index", "draw_rows")
_NEEDED = {  # by each of the flags; verifying needs to know which draws are a row's
    "masked": ("mask_index",),
    "random": ("keys", "temperature"),
    "filtered": ("top_p", "min_p", "top_k"),
    "penalized": ("presence", "frequency", "repetition", "count_slots", "rows", "first_draw", "num_draws", "draft_ids"),
    "biased": ("bias_slots",),
    "drafts": ("rows", "first_draw", "num_draws", "draft_ids"),
}


@dataclass(slots=True)
class _Layout:
    sections: Sections
    ring: PinnedRing
    buffer: torch.Tensor
    views: dict[str, torch.Tensor]
    sent: NDArray[np.int32] | None = None  # what the buffer holds


class PlanCopies:
    """The arrays of a sample plan in one copy, those that the step's flags need. Each layout has a place of its own on
    the GPU; where it holds the same numbers already, as in greedy steps of the same rows, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[tuple[int, int, SampleFlags], _Layout] = {}
        self._unused = {
            np.dtype(np.int32): torch.zeros(1, dtype=torch.int32, device=device),
            np.dtype(np.float32): torch.zeros(1, dtype=torch.float32, device=device),
        }

    def send(self, plan: SamplePlan, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """A tensor for each of the plan's arrays `names`, valid until the next call. Those that the flags do not need
        are a tensor of that type and no meaning."""
        key = len(plan.rows), len(plan.draw_rows), plan.flags
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._make(plan, names)
        pinned, host = layout.ring.take()
        for name, place in layout.sections.places.items():
            host[place] = getattr(plan, name).reshape(-1).view(np.int32)
        if layout.sent is None or not np.array_equal(layout.sent, host):
            layout.buffer.copy_(pinned, non_blocking=True)
            layout.sent = host.copy()
            layout.ring.sent()
        return layout.views

    def _make(self, plan: SamplePlan, names: tuple[str, ...]) -> _Layout:
        needed = set(_ALWAYS).union(*(_NEEDED[flag] for flag in _NEEDED if getattr(plan.flags, flag)))
        arrays = {name: getattr(plan, name) for name in names}
        sections = Sections({name: array.size for name, array in arrays.items() if name in needed})
        buffer = torch.zeros(sections.words, dtype=torch.int32, device=self._device)
        views = {name: self._unused[array.dtype] for name, array in arrays.items()}
        for name, view in sections.views(buffer).items():
            array = arrays[name]
            views[name] = view.view(torch.float32 if array.dtype == np.float32 else torch.int32).view(array.shape)
        return _Layout(sections, PinnedRing(sections.words), buffer, views)


class MaskCopies:
    """Bitmask rows on a stream of their own, into one table: a step's rows, then those that are kept for later steps.

    The step before is over when the host fills a step's masks, so the table is free to be written; the sampler waits
    for the copy.
    """

    def __init__(self, device: torch.device, kept_bytes: int) -> None:
        self.none = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._device = device
        self._kept_bytes = kept_bytes
        self._stream = torch.cuda.Stream(device)
        self._table: torch.Tensor | None = None
        self._moves: PinnedRing | None = None
        self._last_use: torch.cuda.Event | None = None
        self._in_use = False

    def kept_rows(self, words: int) -> int:
        """How many masks of that many words are kept."""
        return self._kept_bytes // (4 * words)

    def send(self, host: torch.Tensor, rows: NDArray[np.int32], kept: Sequence[tuple[int, int]]) -> torch.Tensor:
        """`rows`: those of the table that are read (negative: none). `kept`: (row of the step, place)."""
        table = self._table
        if table is None:
            height = host.shape[0] + self.kept_rows(host.shape[1])
            table = self._table = torch.empty((height, host.shape[1]), dtype=torch.int32, device=self._device)
            self._moves = PinnedRing(2 * host.shape[0])
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._in_use = True
        height = host.shape[0]
        own = rows[(rows >= 0) & (rows < height)].tolist()
        if len(kept) > _FEW_MASKS:
            own += [row for row, _ in kept]
        if not own and not kept:
            return table
        if self._last_use is not None:
            self._stream.wait_event(self._last_use)
        with torch.cuda.stream(self._stream):
            if own:
                first, last = min(own), max(own) + 1
                table[first:last].copy_(host[first:last], non_blocking=True)
            if len(kept) > _FEW_MASKS:
                self._move(table, height, kept)
            else:
                for row, place in kept:
                    table[height + place].copy_(host[row], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return table

    def _move(self, table: torch.Tensor, height: int, kept: Sequence[tuple[int, int]]) -> None:
        """From the step's rows of the table to the places."""
        assert self._moves is not None
        count = len(kept)
        pinned, moves = self._moves.take()
        moves[: 2 * count] = np.array(kept, np.int32).T.reshape(-1)
        moves[count : 2 * count] += height
        index = pinned[: 2 * count].to(self._device, non_blocking=True)
        self._moves.sent()
        table[index[count:].long()] = table[index[:count].long()]

    def used(self, event: torch.cuda.Event) -> None:
        """What was queued up to `event` is all that reads the masks sent last."""
        if self._in_use:
            self._last_use = event
            self._in_use = False


class HostCopies:
    """Tensors of one step on their way to the host. Parts of one small block, as the sampler makes, go in one copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], ring: PinnedRing) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._copied = False
        self._parts = dict(tensors)
        block = _common_block(self._parts)
        if block is not None and block.numel() <= RESULT_WORDS:
            pinned, host = ring.take()
            pinned[: block.numel()].copy_(block, non_blocking=True)
            for name, tensor in self._parts.items():
                first = tensor.storage_offset()
                self._arrays[name] = host[first : first + tensor.numel()]
            self.event = ring.sent()
            return
        for name, tensor in self._parts.items():
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._arrays[name] = pinned.copy_(tensor, non_blocking=True).numpy()
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Mapping[str, NDArray[Any]]:
        if not self._copied:
            self.event.synchronize()
            self._arrays = {name: array.copy() for name, array in self._arrays.items()}  # the ring goes on
            self._copied = True
            self._parts.clear()
        return self._arrays


def _common_block(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The flat int32 storage that all of them are vectors of, or None."""
    first = next(iter(tensors.values()), None)
    if first is None:
        return None
    storage = first.untyped_storage()
    address = storage.data_ptr()
    for tensor in tensors.values():
        if tensor.ndim != 1 or tensor.dtype != torch.int32 or tensor.untyped_storage().data_ptr() != address:
            return None
    return first.as_strided((storage.nbytes() // 4,), (1,), 0)
