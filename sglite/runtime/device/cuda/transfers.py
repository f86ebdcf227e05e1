"""Copies between host and GPU that nobody waits for at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.device.cuda.inputs import Sections

_LAYOUTS = 1024  # kept; a layout is made again when it is needed again


class PlanCopies:
    """The arrays of a sample plan in one copy. Each layout has a place of its own on the GPU, used step after step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[tuple[int, ...], tuple[Sections, torch.Tensor, dict[str, torch.Tensor]]] = {}

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """int32 and float32 arrays -> tensors of the same shapes, valid until the next but one call."""
        sections, buffer, views = self._layout(arrays)
        pinned = torch.empty(sections.words, dtype=torch.int32, pin_memory=True)
        host = pinned.numpy()
        for name, array in arrays.items():
            first = sections.places[name].start
            host[first : first + array.size] = array.reshape(-1).view(np.int32)
        buffer.copy_(pinned, non_blocking=True)
        return views

    def _layout(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Sections, torch.Tensor, dict[str, torch.Tensor]]:
        key = tuple(array.size for array in arrays.values())
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            sections = Sections({name: array.size for name, array in arrays.items()})
            buffer = torch.empty(sections.words, dtype=torch.int32, device=self._device)
            views = sections.views(buffer)
            for name, array in arrays.items():
                dtype = torch.float32 if array.dtype == np.float32 else torch.int32
                views[name] = views[name].view(dtype).view(array.shape)
            found = self._layouts[key] = sections, buffer, views
        return found


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
    """Tensors of one step on their way to the host. Those that are parts of one small block go in one copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        blocks: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            words = storage.nbytes() // tensor.itemsize
            if words > 4 * tensor.numel():  # a piece of something large
                self._arrays[name] = _pinned_copy(tensor.contiguous()).numpy()
                continue
            block = blocks.get(storage.data_ptr())
            if block is None:
                block = blocks[storage.data_ptr()] = _pinned_copy(tensor.as_strided((words,), (1,), 0))
            view = block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            self._arrays[name] = view.numpy()
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Mapping[str, NDArray[Any]]:
        self.event.synchronize()
        return self._arrays


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
