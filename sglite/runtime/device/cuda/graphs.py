"""Captured graphs: small steps up to the logits, one per padded size, and the draws from them.

A forward graph holds the input preparation and the whole model, so a step is one copy of its numbers and one launch. A
graph is captured when its size comes the second time, right after that step ran launch by launch: nothing is executed
twice. All graphs share a memory pool: a forward's logits are read by the draws of the same step, before any replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sglite.runtime.device.base import ForwardBatch, ForwardFn, SampleBatch, SampleFn, SampleOutput
from sglite.runtime.device.cuda.inputs import CudaForwardBatch, GraphKey
from sglite.runtime.device.cuda.recent import Recent
from sglite.runtime.device.cuda.step_times import StepTimes

_MOST_FORWARDS = 256  # graphs of the model that are kept: 8 MiB of the GPU and 4 of the host each
_MOST_SAMPLES = 2048  # of draws, which are much smaller
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    result: Result  # tensors that a replay writes


class GraphPool:
    """Captures on a stream of its own, in memory that all graphs share."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._handle: Any = None

    def capture(self, run: Callable[[], Result]) -> Captured[Result]:
        """Record what run() launches; nothing is executed."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph, result)


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
        self._seen: set[GraphKey] = set()
        self._times = StepTimes(lambda: torch.cuda.Event(enable_timing=True))

    def has(self, key: GraphKey) -> bool:
        return key in self._graphs

    def seconds(self, key: GraphKey) -> float | None:
        """What steps of that size take on the device, whatever the length of their rows; None: not measured yet."""
        return self._times.seconds((key.decode, key.tokens))

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        key = batch.key
        if key is None:
            return self._forward(batch)
        found = self._graphs.get(key)
        if found is not None:
            self._times.run((key.decode, key.tokens), found.graph.replay)
            return found.result[: batch.num_logits]
        logits = self._run(batch)
        if self._capture:
            if key in self._seen:
                self._graphs.put(key, self._pool.capture(lambda: self._run(batch)))
            self._seen.add(key)
        return logits[: batch.num_logits]

    def capture_ahead(self, batch: CudaForwardBatch) -> None:
        """Make the graph of a size before a step needs it. `batch`: nothing but padding."""
        assert batch.key is not None
        if self._capture and batch.key not in self._graphs:
            self._run(batch)
            self._graphs.put(batch.key, self._pool.capture(lambda: self._run(batch)))

    def _run(self, batch: CudaForwardBatch) -> torch.Tensor:
        self._prepare(batch)
        return self._forward(batch)


class SampleGraphs:
    """The draws over logits that stand where they stood before, from numbers that do, are a graph too."""

    def __init__(self, sample: SampleFn, pool: GraphPool, *, capture: bool) -> None:
        self._sample = sample
        self._pool = pool
        self._capture = capture
        self._graphs: Recent[Hashable, Captured[SampleOutput]] = Recent(_MOST_SAMPLES)
        self._seen: set[Hashable] = set()

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
