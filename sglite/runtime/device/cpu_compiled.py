"""The CPU in float32 with compiled kernels: layer operations and attention over cpu_kernels.py."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.device.base import AttentionLayer, AttentionShape, ForwardBatch, LayerOps, Norm, PackedWeight
from sglite.runtime.device.cpu_attention import CpuKVCache
from sglite.runtime.device.cpu_kernels import kernels, layout
from sglite.runtime.device.cpu_kernels.vectors import PANEL

_SPAN_BYTES = 64 << 10  # of weights that a thread takes at a time
_MAX_CONTEXT = 1 << 23  # tokens; a thread's scratch has room for that many scores, of memory that is never touched


class Helpers:
    """The threads beside the caller's, and the memory by which they are told what to do. They sleep while there is
    nothing to do, and end with this object. One caller at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._words = _aligned_zeros(8 * (layout.STATE_WORDS + 8 * max(1, count))).view(np.int64)
        self.state = self._words.ctypes.data
        self._asleep = self._words[layout.STATE_WORDS :: 8]
        self._own_scratch = _scratch()
        self.scratch = self._own_scratch.ctypes.data
        self._wakers = [threading.Lock() for _ in range(count)]
        for i, waker in enumerate(self._wakers):
            waker.acquire()
            self._asleep[i] = 1
            name = f"sglite-cpu-{i + 1}"
            threading.Thread(target=_help, args=(self._words, i, waker), daemon=True, name=name).start()
        weakref.finalize(self, _dismiss, self._words, self._wakers)

    def wake(self) -> None:
        """Those that sleep. What they are woken for is the caller's next job: this one is done."""
        for i, waker in enumerate(self._wakers):
            if self._asleep[i]:
                self._asleep[i] = 0
                waker.release()


def _help(words: NDArray[np.int64], index: int, waker: threading.Lock) -> None:
    scratch = _scratch()
    while True:
        waker.acquire()
        if not words[layout.QUIT]:
            kernels.call(
                layout.HELP, words.ctypes.data, 0, scratch.ctypes.data, index, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0
            )
        if words[layout.QUIT]:
            return


def _dismiss(words: NDArray[np.int64], wakers: list[threading.Lock]) -> None:
    words[layout.QUIT] = 1
    for waker in wakers:
        if waker.locked():
            waker.release()


def _scratch() -> NDArray[np.uint8]:
    return np.zeros(layout.TILE_BYTES + 4 * (_MAX_CONTEXT + 4), np.uint8)


def _aligned_zeros(size: int) -> NDArray[np.uint8]:
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size]


class PanelWeight:
    """float32[panels, inputs, PANEL]; the last panel is filled up with zeros."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        outputs, panels = self.outputs, -(-self.outputs // PANEL)
        self._memory = torch.empty((panels, self.inputs, PANEL))
        whole = outputs // PANEL
        self._memory[:whole].copy_(weight[: whole * PANEL].view(whole, PANEL, self.inputs).transpose(1, 2))
        if whole < panels:
            self._memory[whole].zero_()
            self._memory[whole, :, : outputs - whole * PANEL].copy_(weight[whole * PANEL :].t())
        self.address = self._memory.data_ptr()
        self.span = max(1, _SPAN_BYTES // (4 * PANEL * self.inputs))


@dataclass(slots=True)
class _Room:
    """Where normalised rows are kept between two calls' phases."""

    memory: torch.Tensor
    address: int


class CompiledOps:
    """LayerOps for float32 weights; `others` has what is of another type."""

    def __init__(self, helpers: Helpers, others: LayerOps) -> None:
        self._helpers = helpers
        self._others = others
        self._room = _Room(torch.empty(0), 0)

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return self.pack_tied(weight)[0]

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        if weight.dtype != torch.float32:
            return self._others.pack_tied(weight)
        return PanelWeight(weight), weight

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(weight, PanelWeight):
            return self._others.norm_linear(x, norm, weight, bias)
        return self._product(x, norm, weight, bias, None, torch.empty((x.shape[0], weight.outputs)))

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: PackedWeight) -> torch.Tensor:
        if not isinstance(weight, PanelWeight):
            return self._others.norm_gated(x, norm, weight)
        rows, outputs, helpers = x.shape[0], weight.outputs // 2, self._helpers
        if outputs % PANEL:  # the last panel of gate is the first of up
            gate, up = self.norm_linear(x, norm, weight, None).chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).mul_(up)
        out = torch.empty((rows, outputs))
        if kernels.call(
            layout.GATED, helpers.state, helpers.count, helpers.scratch,
            x.data_ptr(), rows, weight.inputs, norm.weight.data_ptr(), self._place(rows * weight.inputs),
            weight.address, outputs, 0, 0, out.data_ptr(), max(1, weight.span // 2), norm.eps,
        ):  # fmt: skip
            helpers.wake()
        return out

    def linear_add(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(weight, PanelWeight):
            return self._others.linear_add(x, weight, bias, residual)
        return self._product(x, None, weight, bias, residual, residual)

    def _product(
        self, x: torch.Tensor, norm: Norm | None, weight: PanelWeight, bias: torch.Tensor | None,
        residual: torch.Tensor | None, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        rows, helpers = x.shape[0], self._helpers
        if kernels.call(
            layout.PRODUCT, helpers.state, helpers.count, helpers.scratch,
            x.data_ptr(), rows, weight.inputs,
            0 if norm is None else norm.weight.data_ptr(), 0 if norm is None else self._place(rows * weight.inputs),
            weight.address, weight.outputs, 0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(), out.data_ptr(), weight.span,
            0.0 if norm is None else norm.eps,
        ):  # fmt: skip
            helpers.wake()
        return out

    def _place(self, count: int) -> int:
        if self._room.memory.numel() < count:
            memory = torch.empty(count)
            self._room = _Room(memory, memory.data_ptr())
        return self._room.address


class CompiledAttention:
    """Attention for float32: a thread takes one query head of one token at a time."""

    def __init__(self, shape: AttentionShape, cache: CpuKVCache, helpers: Helpers) -> None:
        self._shape = shape
        self._helpers = helpers
        self._cache = cache
        self._layers = [kv.data_ptr() for kv in cache.kv]
        self._plan = np.zeros(layout.PLAN_WORDS, np.int64)
        self._numbers = np.array([0.0, 0.0, shape.scale], np.float32)
        self._plan_address, self._numbers_address = self._plan.ctypes.data, self._numbers.ctypes.data
        self._kept: tuple[object, ...] = ()  # what the plan's addresses point to

    def plan(self, batch: ForwardBatch) -> None:
        shape, plan, size = self._shape, batch.batch, self._cache.page_size
        table = batch.host_page_table
        rows = np.ascontiguousarray(np.repeat(plan.rows, plan.num_new), np.int32)
        positions = np.ascontiguousarray(batch.positions.numpy(), np.int32)
        assert positions.max(initial=0) < _MAX_CONTEXT, "a text of 8 million tokens"
        slots = np.ascontiguousarray(batch.slots.numpy(), np.int32)
        self._kept = (rows, positions, slots, table)
        self._plan[:] = (
            len(rows), shape.num_heads, shape.num_kv_heads, shape.head_dim, 0,
            positions.ctypes.data, slots.ctypes.data, rows.ctypes.data, table.ctypes.data, table.shape[1], size,
        )  # fmt: skip

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        shape, helpers, norms = self._shape, self._helpers, layer.norms
        self._plan[4] = layer.cos_sin.data_ptr()
        q_norm = k_norm = 0
        if norms is not None:
            q_norm, k_norm = norms[0].weight.data_ptr(), norms[1].weight.data_ptr()
            self._numbers[0], self._numbers[1] = norms[0].eps, norms[1].eps
        out = torch.empty((qkv.shape[0], shape.num_heads * shape.head_dim))
        if kernels.call(
            layout.ATTEND, helpers.state, helpers.count, helpers.scratch,
            qkv.data_ptr(), self._layers[layer.number], out.data_ptr(), self._plan_address, q_norm, k_norm,
            self._numbers_address, 0, 0, 0, 0, 0.0,
        ):  # fmt: skip
            helpers.wake()
        return out


class CompiledKernels:
    """What a device takes from here. `threads`: the caller's and its helpers."""

    def __init__(self, threads: int) -> None:
        self._helpers = Helpers(threads - 1)

    def ops(self, others: LayerOps) -> CompiledOps:
        return CompiledOps(self._helpers, others)

    def attention(self, shape: AttentionShape, cache: CpuKVCache) -> CompiledAttention:
        return CompiledAttention(shape, cache, self._helpers)
