"""Copies between host and GPU that nobody waits for at once, and that cost the host little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.device.base import SampleFlags, SamplePlan
from sglite.runtime.device.cuda.inputs import PinnedRing, Sections

_LAYOUTS = 1024  # kept; a layout is made again when it is needed again
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
    """Bitmask rows on a stream of their own. A host buffer has one twin on the GPU; the copy into it waits for the
    step that last read it, and the sampler waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self.none = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._twins: dict[int, torch.Tensor] = {}
        self._last_use: dict[int, torch.cuda.Event] = {}
        self._in_use: int | None = None

    def send(self, host: torch.Tensor, rows: NDArray[np.int32]) -> torch.Tensor:
        """`rows`: those that are read (negative: none)."""
        key = host.data_ptr()
        twin = self._twins.get(key)
        if twin is None:
            twin = self._twins[key] = torch.empty(host.shape, dtype=torch.int32, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        used = self._last_use.get(key)
        if used is not None:
            self._stream.wait_event(used)
        first, last = int(rows[rows >= 0].min()), int(rows.max()) + 1
        with torch.cuda.stream(self._stream):
            twin[first:last].copy_(host[first:last], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_use = key
        return twin

    def used(self, event: torch.cuda.Event) -> None:
        """What was queued up to `event` is all that reads the masks sent last."""
        if self._in_use is not None:
            self._last_use[self._in_use] = event
            self._in_use = None


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
