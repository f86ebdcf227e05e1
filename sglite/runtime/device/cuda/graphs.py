"""Captured graphs: small steps up to the logits, one per padded size, and the draws from them.

A forward graph holds the input preparation and the whole model, so a step is one copy of its numbers and one launch.
Capturing launches nothing: it takes the host as long as launching the kernels one by one, so that a step whose graph
is not there yet is captured and replayed. Most graphs are captured before, while nobody waits (ahead.py).

Forward graphs share their memory, logits included: those of a step are read by the draws of the same step, before any
replay. The draws' graphs have memory of their own, as they run while logits are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sglite.runtime.device.base import ForwardBatch, ForwardFn, SampleBatch, SampleFn, SampleOutput
from sglite.runtime.device.cuda.inputs import CudaForwardBatch, GraphKey
from sglite.runtime.device.cuda.recent import Recent
from sglite.runtime.device.cuda.step_times import StepTimes

_log = logging.getLogger("sglite.engine")

_MOST_FORWARDS = 256  # graphs of the model that are kept: 8 MiB of the GPU and 4 of the host each
_MOST_SAMPLES = 2048  # of draws, which are much smaller
_NUMBERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # by size
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    result: Result  # tensors that a replay writes


class GraphPool:
    """Captures on a stream of its own, in memory that all its graphs share."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._handle: Any = None

    def capture(self, run: Callable[[], Result]) -> Captured[Result]:
        """Record what run() launches; nothing is executed. Kernels that were never used are loaded meanwhile, which
        only the relaxed mode allows."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._handle, capture_error_mode="relaxed")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._stream = None  # neither it nor the pool can be captured with again
            raise
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graph, result)


class _Place:
    """Where a tensor stands, without a hold on its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _NUMBERS[tensor.itemsize],
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CUDA tensor once more: memory of a graph pool may serve the next capture beside it."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_Place(tensor), device=tensor.device).view(tensor.dtype)


class ForwardGraphs:
    """`prepare` launches the preparation of a padded batch's inputs. Without `capture` all is launched singly."""

    def __init__(
        self, forward: ForwardFn, prepare: Callable[[CudaForwardBatch], None], pool: GraphPool, *, capture: bool
    ) -> None:
        self._forward = forward
        self._prepare = prepare
        self._pool = pool
        self._capture = capture
        self._graphs: Recent[GraphKey, Captured[torch.Tensor]] = Recent(_MOST_FORWARDS)
        self._times = StepTimes(lambda: torch.cuda.Event(enable_timing=True))
        self._began = False  # a step was launched singly: libraries have set themselves up
        self._seen: set[GraphKey] = set()  # that steps had before there was a graph
        self._refused: set[GraphKey] = set()  # could not be captured

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, key: GraphKey) -> bool:
        return key in self._graphs

    def seconds(self, key: GraphKey) -> float | None:
        """What steps of that size take on the device, whatever the length of their rows; None: not measured yet."""
        return self._times.seconds(_kind(key))

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        key = batch.key
        if key is None:
            self._begin()
            return self._forward(batch)
        found = self._graphs.get(key)
        if found is None:
            self._seen.add(key)
            found = self.capture(batch) if self._began else None
            self._begin()
        if found is None:
            return self._run(batch)[: batch.num_logits]
        self._times.run(_kind(key), found.graph.replay)
        return found.result[: batch.num_logits]

    def capture(self, batch: CudaForwardBatch) -> Captured[torch.Tensor] | None:
        """Make the graph of a batch's size, or make it again; of its numbers none matters. None: there is none."""
        key = batch.key
        assert key is not None
        if not self._capture or key in self._refused:
            return None
        try:
            made = self._pool.capture(lambda: self._run(batch))
        except RuntimeError:
            _log.exception("steps of the kind %s run without a graph: it could not be captured", key)
            self._refused.add(key)
            return None
        kept = Captured(made.graph, borrowed(made.result))
        self._graphs.put(key, kept)
        return kept

    @contextmanager
    def singly(self) -> Iterator[None]:
        """Everything is launched kernel by kernel meanwhile."""
        capture, self._capture = self._capture, False
        try:
            yield
        finally:
            self._capture = capture
            self._seen.clear()

    def _begin(self) -> None:
        if not self._began:
            torch.cuda.current_blas_handle()
            self._began = True

    def _run(self, batch: CudaForwardBatch) -> torch.Tensor:
        self._prepare(batch)
        return self._forward(batch)


def _kind(key: GraphKey) -> Hashable:
    """Of steps that take about as long."""
    return key.decode, key.tokens, key.tree is None


class SampleGraphs:
    """The draws over logits that stand where they stood before, from numbers that do, are a graph too."""

    def __init__(self, sample: SampleFn, pool: GraphPool, *, capture: bool) -> None:
        self._sample = sample
        self._pool = pool
        self._capture = capture
        self._graphs: Recent[Hashable, Captured[SampleOutput]] = Recent(_MOST_SAMPLES)
        self._seen: set[Hashable] = set()

    @contextmanager
    def singly(self) -> Iterator[None]:
        """See ForwardGraphs."""
        capture, self._capture = self._capture, False
        try:
            yield
        finally:
            self._capture = capture

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> SampleOutput:
        if not self._capture or batch.flags.filtered:
            return self._sample(logits, batch)
        key = (
            batch.flags,
            len(batch.plan.rows),
            len(batch.plan.draw_rows),
            batch.logits_index.data_ptr(),
            logits.data_ptr(),
            logits.stride(0),
            batch.masks.data_ptr(),
            batch.counts.data_ptr(),
            batch.bias.data_ptr(),
        )
        found = self._graphs.get(key)
        if found is not None:
            found.graph.replay()
            return found.result
        output = self._sample(logits, batch)
        if key in self._seen:
            self._graphs.put(key, self._pool.capture(lambda: self._sample(logits, batch)))
        if len(self._seen) > 4 * _MOST_SAMPLES:  # mostly logits of large steps, which never stand in one place twice
            self._seen.clear()
        self._seen.add(key)
        return output
