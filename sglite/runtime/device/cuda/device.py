"""One NVIDIA GPU: it prepares a step's inputs, replays captured steps, and copies results back, without ever waiting.

Everything runs on one stream in the order of the calls; only mask copies have a stream of their own, so that they
overlap with the forward that is still running. Host memory comes from torch's pinned allocator, which hands a block
out again only when the copies from it are over.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from threading import Thread

import numpy as np
import torch

from sglite.errors import InvalidRequest
from sglite.home import home
from sglite.runtime.batch import Batch
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.base import (
    PLAN_ARRAYS,
    AttentionBackend,
    AttentionShape,
    ForwardBatch,
    ForwardFn,
    KVCache,
    LayerOps,
    RowTables,
    SampleBatch,
    SampleFn,
    SamplePlan,
    SamplerOps,
)
from sglite.runtime.device.cuda.ahead import keys_ahead, padding
from sglite.runtime.device.cuda.attention import CudaAttention, choose_splits
from sglite.runtime.device.cuda.graphs import ForwardGraphs, GraphPool, SampleGraphs
from sglite.runtime.device.cuda.inputs import (
    MAX_SMALL,
    CudaForwardBatch,
    GraphKey,
    PinnedRing,
    SmallStep,
    launch_prepare,
    padded,
    send_large,
    small_batch,
)
from sglite.runtime.device.cuda.invariant import InvariantAttention, InvariantOps
from sglite.runtime.device.cuda.ops import CudaOps
from sglite.runtime.device.cuda.sampler import CudaSamplerOps
from sglite.runtime.device.cuda.transfers import RESULT_WORDS, HostCopies, MaskCopies, PlanCopies
from sglite.runtime.device.cuda.tree_plan import TreeKey
from sglite.runtime.device.cuda.wanted import Wanted
from sglite.runtime.device.inputs import HostInputs, host_inputs
from sglite.runtime.device.torch_attention import TorchAttention

_KEPT_MASK_BYTES = 128 << 20  # masks that rows have in common
_CAPTURES_A_REST = 3  # of 10 to 20 ms each, in a second without requests
_RESERVE = 1 << 30  # bytes for captured graphs and the context's own needs
_FEW_LOGITS = 128  # up to that many rows more or less cost the output projection nothing, but another graph
_REPEATED_READS = 4  # a small step may read its rows' KV this many times over rather than go through a plan


def make(name: str, config: EngineConfig) -> CudaDevice:
    """`name`: "cuda" or "cuda:1". Raises InvalidRequest for a GPU that is not there."""
    index = int(name.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise InvalidRequest(
            f"device={name!r}: this machine has {torch.cuda.device_count()} usable NVIDIA GPUs; use device='cpu'",
            param="device",
        )
    os.environ.setdefault("TRITON_CACHE_DIR", str(home() / "triton"))  # kernels compile once per machine
    return CudaDevice(index, graphs=config.cuda_graphs, deterministic=config.deterministic)


class CudaDevice:
    """`graphs`: replay captured graphs for small steps. `deterministic`: see invariant.py."""

    overlaps = True
    ops: LayerOps

    def __init__(self, index: int, *, graphs: bool, deterministic: bool = False) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._pdl = torch.cuda.get_device_capability(index) >= (9, 0)
        self.ops = InvariantOps(pdl=self._pdl) if deterministic else CudaOps(pdl=self._pdl)
        self._index = index
        self._capture = graphs
        self._deterministic = deterministic
        self._attention: CudaAttention | InvariantAttention | None = None
        self._shape: AttentionShape | None = None
        self._tables: RowTables | None = None
        self._small: dict[tuple[int, int], SmallStep] = {}
        self._plans = PlanCopies(self.torch_device)
        self._masks = MaskCopies(self.torch_device, _KEPT_MASK_BYTES)
        self._results = PinnedRing(RESULT_WORDS)
        self._pool = GraphPool()
        self._rested = False
        self._forward: ForwardGraphs | None = None
        self._ahead: list[GraphKey] | None = None  # captured while nobody asks
        self._wanted: Wanted[GraphKey] = Wanted(time.perf_counter)
        self._longest = 0  # cached tokens of a row of the last small step
        self._tree: TreeKey | None = None  # of that step

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return max(0, torch.cuda.mem_get_info(self._index)[0] - _RESERVE)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def kept_mask_rows(self, words: int) -> int:
        return self._masks.kept_rows(words)

    def caught_up(self) -> bool:
        return torch.cuda.current_stream(self.torch_device).query()

    def make_kv_cache(self, shape: AttentionShape, *, num_pages: int, page_size: int) -> KVCache:
        def one() -> torch.Tensor:
            size = (num_pages * page_size, shape.num_kv_heads, shape.head_dim)
            return torch.zeros(size, dtype=shape.dtype, device=self.torch_device)

        layers = range(shape.num_layers)
        return KVCache([one() for _ in layers], [one() for _ in layers], page_size)

    def make_attention(self, shape: AttentionShape, cache: KVCache) -> AttentionBackend:
        """float32 and head sizes without kernels go through the torch reference, which is slow. Raises InvalidRequest
        where they were to be deterministic."""
        if shape.dtype == torch.float32 or shape.head_dim not in (64, 128, 256):
            if self._deterministic:
                raise InvalidRequest(
                    "deterministic=True has kernels for bfloat16 and float16 and heads of 64, 128 or 256, not for "
                    f"{shape.dtype} and heads of {shape.head_dim}",
                    param="deterministic",
                )
            return TorchAttention(shape, cache)
        self._shape = shape
        if self._deterministic:
            self._attention = InvariantAttention(shape, cache, pdl=self._pdl)
            return self._attention
        self._attention = CudaAttention(shape, cache, max_tokens=MAX_SMALL, pdl=self._pdl)
        return self._attention

    def sampler_ops(self) -> SamplerOps | None:
        return CudaSamplerOps(self.torch_device)

    def prepare(self, batch: Batch, tables: RowTables) -> ForwardBatch:
        if torch.cuda.current_device() != self._index:
            torch.cuda.set_device(self._index)  # it is a property of the calling thread
        self._tables = tables
        inputs = host_inputs(batch, tables.host_page_table, tables.page_size)
        key = self._graph_key(batch, inputs)
        if key is None:
            return send_large(batch, inputs, tables)
        step = self._small.get((key.tokens, key.logits))
        if step is None:
            step = self._small[key.tokens, key.logits] = SmallStep(key.tokens, key.logits, self.torch_device)
        if len(batch.page_updates) > step.updates:
            return send_large(batch, inputs, tables)
        step.send(batch, inputs, tables.host_page_table.shape[1])
        return small_batch(batch, step.views, tables, key, num_logits=len(inputs.logits_index))

    def _graph_key(self, batch: Batch, inputs: HostInputs) -> GraphKey | None:
        """None: the step is too large to be padded."""
        if self._attention is None or self._shape is None or batch.num_tokens > MAX_SMALL:
            return None
        tokens, wanted = batch.num_tokens, len(inputs.logits_index)
        invariant = isinstance(self._attention, InvariantAttention)
        tree, cached = (None, inputs.positions) if invariant else self._attention.tree.plan(batch, inputs)
        if tokens == len(batch.rows):
            decode = not batch.loads and wanted == tokens
        else:
            decode = False
            read = int(cached.sum(dtype=np.int64))
            if read > _REPEATED_READS * int((batch.starts + batch.num_new).sum(dtype=np.int64)) + 65536:
                return None
        self._longest, self._tree = int(cached.max()), tree
        return self._key(tokens, wanted, decode=decode, tree=tree)

    def _key(self, tokens: int, wanted: int, *, decode: bool, tree: TreeKey | None) -> GraphKey:
        """The graph for so many tokens and logits, with rows as long as those of the last step."""
        assert self._shape is not None
        size = padded(tokens, coarse=not decode)
        if wanted == tokens and (decode or size > _FEW_LOGITS):
            logits = 0
        else:
            logits = max(padded(wanted, coarse=True), min(size, _FEW_LOGITS))
        if isinstance(self._attention, InvariantAttention):
            return GraphKey(size, logits, False, 1)
        return GraphKey(size, logits, decode, choose_splits(size, self._shape.num_kv_heads, self._longest), tree)

    def prepare_sample(
        self,
        plan: SamplePlan,
        *,
        host_masks: torch.Tensor,
        kept_masks: Sequence[tuple[int, int]],
        counts: torch.Tensor,
        bias: torch.Tensor,
        last_tokens: torch.Tensor,
    ) -> SampleBatch:
        return SampleBatch(
            flags=plan.flags,
            plan=plan,
            **self._plans.send(plan, PLAN_ARRAYS),
            masks=self._masks.send(host_masks, plan.mask_index, kept_masks) if plan.flags.masked else self._masks.none,
            counts=counts,
            bias=bias,
            last_tokens=last_tokens,
        )

    def capture_forward(self, forward: ForwardFn) -> ForwardFn:
        self._forward = ForwardGraphs(forward, self._prepare_small, self._pool, capture=self._capture)
        return self._forward

    def capture_sample(self, sample: SampleFn) -> SampleFn:
        return SampleGraphs(sample, self._pool, capture=self._capture)

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> HostCopies:
        copies = HostCopies(tensors, self._results)
        self._masks.used(copies.event)
        return copies

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        """See Executor. A step of one token a row has its graph soon, whatever it takes; of several tokens there are
        many sizes, which are captured between steps when they were asked for."""
        if self._attention is None or self._forward is None or not self._capture:
            return 0.0
        if num_tokens > MAX_SMALL:
            return None
        decode = num_tokens == num_rows
        key = self._key(num_tokens, num_rows, decode=decode, tree=None)
        if not decode and self._tree is not None:  # too many kinds to tell which it will be: captured by the step
            return (self._forward.seconds(key) or 0.0) if self._wanted.may_capture else None
        if not decode and not self._forward.has(key):
            self._wanted.ask(key)
            return None
        return self._forward.seconds(key) or 0.0

    def between_steps(self) -> None:
        key = self._wanted.take(idle=False)
        if key is not None:
            began = time.perf_counter()
            self._capture_ahead(key)
            self._wanted.spend(time.perf_counter() - began)

    def rest(self) -> None:
        """Prompts of more than a small step and top-k, top-p and min-p need FlashInfer, whose import takes seconds.
        Steps with forced text are of several tokens a row: their graphs would be captured while somebody waits."""
        for _ in range(_CAPTURES_A_REST):
            self._capture_one_ahead()
        if not self._rested and importlib.util.find_spec("flashinfer") is not None:
            Thread(target=importlib.import_module, args=("flashinfer",), name="sglite-import", daemon=True).start()
        self._rested = True

    def _capture_one_ahead(self) -> None:
        if self._shape is None or self._tables is None or not isinstance(self._attention, CudaAttention):
            return
        if self._ahead is None:
            self._ahead = keys_ahead(self._shape.num_kv_heads)
        key = self._wanted.take(idle=True) or (self._ahead.pop(0) if self._ahead else None)
        if key is not None:
            self._capture_ahead(key)

    def _capture_ahead(self, key: GraphKey) -> None:
        """Make the graph of a size from a step of nothing but padding."""
        tables = self._tables
        if not self._capture or self._forward is None or tables is None:
            return
        with torch.inference_mode():
            step = self._small.get((key.tokens, key.logits))
            if step is None:
                step = self._small[key.tokens, key.logits] = SmallStep(key.tokens, key.logits, self.torch_device)
            step.send_padding()
            batch = small_batch(padding(key.tokens), step.views, tables, key, num_logits=key.logits)
            self._forward.capture_ahead(batch)

    def _prepare_small(self, batch: CudaForwardBatch) -> None:
        assert self._tables is not None and batch.key is not None
        step = self._small[batch.key.tokens, batch.key.logits]
        launch_prepare(step.views, self._tables, programs=1 if batch.key.tokens <= 64 else 4)
