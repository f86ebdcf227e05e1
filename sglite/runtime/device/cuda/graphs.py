"""Small steps as captured graphs, one per padded size, made when a size comes the second time.

A graph holds the input preparation and the whole model up to the logits, so a step is one copy of its numbers and one
launch. All graphs share a memory pool: their outputs are read by the sampler of the same step, before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglite.runtime.device.base import ForwardBatch, ForwardFn
from sglite.runtime.device.cuda.inputs import CudaForwardBatch, GraphKey


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [key.logits, V]


class ForwardGraphs:
    """`prepare` launches the preparation of a padded batch's inputs. Without `capture` all is launched singly."""

    def __init__(self, forward: ForwardFn, prepare: Callable[[CudaForwardBatch], None], *, capture: bool) -> None:
        self._forward = forward
        self._prepare = prepare
        self._capturing = capture
        self._graphs: dict[GraphKey, _Captured] = {}
        self._seen: set[GraphKey] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        key = batch.key
        if key is None:
            return self._forward(batch)
        wanted = int(batch.batch.num_logits.sum())
        found = self._graphs.get(key)
        if found is not None:
            found.graph.replay()
            return found.logits[:wanted]
        logits = self._run(batch)
        if self._capturing:
            if key in self._seen:
                self._graphs[key] = self._capture(batch)
            self._seen.add(key)
        return logits[:wanted]

    def _run(self, batch: CudaForwardBatch) -> torch.Tensor:
        self._prepare(batch)
        return self._forward(batch)

    def _capture(self, batch: CudaForwardBatch) -> _Captured:
        """Record the launches of the step that has just run; nothing is executed."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._run(batch)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Captured(graph, logits)
