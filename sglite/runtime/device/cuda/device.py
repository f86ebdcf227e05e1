"""One NVIDIA GPU: it prepares a step's inputs, replays captured steps, and copies results back, without ever waiting.

Everything runs on one stream in the order of the calls; only mask copies have a stream of their own, so that they
overlap with the forward that is still running. Host memory comes from torch's pinned allocator, which hands a block
out again only when the copies from it are over.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
from sglite.runtime.device.cuda.ahead import keys_ahead, keys_to_compile
from sglite.runtime.device.cuda.attention import CudaAttention, chunk_tile
from sglite.runtime.device.cuda.compiling import mark, only_compiling
from sglite.runtime.device.cuda.graphs import ForwardGraphs, GraphPool, SampleGraphs
from sglite.runtime.device.cuda.inputs import (
    MAX_SMALL,
    SIZES,
    CudaForwardBatch,
    GraphKey,
    PinnedRing,
    SmallStep,
    launch_prepare,
    send_large,
    small_batch,
    zeros,
)
from sglite.runtime.device.cuda.invariant import InvariantAttention, InvariantOps
from sglite.runtime.device.cuda.keys import graph_key, invariant_key, larger_sizes, with_chunks
from sglite.runtime.device.cuda.ops import CudaOps
from sglite.runtime.device.cuda.planner import load_attention
from sglite.runtime.device.cuda.sampler import CudaSamplerOps, load_filters
from sglite.runtime.device.cuda.transfers import RESULT_WORDS, HostCopies, MaskCopies, PlanCopies
from sglite.runtime.device.cuda.tree_plan import TreeKey
from sglite.runtime.device.cuda.wanted import Wanted
from sglite.runtime.device.inputs import HostInputs, host_inputs
from sglite.runtime.device.threads import usable_cpus
from sglite.runtime.device.torch_attention import TorchAttention

_KEPT_MASK_BYTES = 128 << 20  # masks that rows have in common
_RESERVE = 1 << 30  # bytes for captured graphs and the context's own needs
_REPEATED_READS = 4  # a small step may read its rows' KV this many times over rather than go through a plan
_LARGE_STEPS = ((1, 1040, 0), (1, 1041, 0), (1, 1041, 16), (8, 131, 16))
# Rows, new tokens of each and cached ones: long and short rows, with and without a cache, multiples of 16 and others.
_FEW_READS = 1 << 16  # cached tokens beside that: what a prompt of MAX_SMALL tokens reads of itself


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
        self._library: Thread | None = None  # imports FlashInfer
        self._sampler = CudaSamplerOps(self.torch_device)
        self._forward: ForwardGraphs | None = None
        self._samples: SampleGraphs | None = None
        self._ahead: deque[GraphKey] | None = None  # captured while nobody asks
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
        return self._sampler

    def prepare(self, batch: Batch, tables: RowTables) -> ForwardBatch:
        if torch.cuda.current_device() != self._index:
            torch.cuda.set_device(self._index)  # it is a property of the calling thread
        self._tables = tables
        inputs = host_inputs(batch, tables.host_page_table, tables.page_size)
        key = self._graph_key(batch, inputs)
        if key is None:
            return send_large(batch, inputs, tables)
        step = self._small_step(key)
        step.send(batch, inputs, tables)
        return small_batch(batch, step.views, tables, key, num_logits=len(inputs.logits_index))

    def _graph_key(self, batch: Batch, inputs: HostInputs) -> GraphKey | None:
        """None: the step is too large to be padded."""
        if self._attention is None or self._shape is None or batch.num_tokens > MAX_SMALL:
            return None
        tokens, wanted = batch.num_tokens, len(inputs.logits_index)
        single = tokens == len(batch.rows)
        tree, cached = None, inputs.positions
        if not isinstance(self._attention, InvariantAttention):
            tree, cached = self._attention.tree.plan(batch if single else with_chunks(batch), inputs)
        decode = single and not batch.loads and wanted == tokens
        if not single:
            read = int(cached.sum(dtype=np.int64)) // self._read_together(tree)
            if read > _REPEATED_READS * int((batch.starts + batch.num_new).sum(dtype=np.int64)) + _FEW_READS:
                return None
        self._longest, self._tree = int(cached.max()), tree
        return self._key_at_hand(tokens, wanted, decode=decode, tree=tree)

    def _key_at_hand(self, tokens: int, wanted: int, *, decode: bool, tree: TreeKey | None) -> GraphKey:
        """Where the graph is not there but one of a larger size is, that one: rows that end one after the other do not
        wait for a capture each."""
        key = self._key(tokens, wanted, decode=decode, tree=tree)
        if self._forward is None or not self._capture or self._forward.has(key):
            return key
        for size in larger_sizes(key):
            larger = self._key(size, wanted, decode=decode, tree=tree)
            if self._forward.has(larger):
                self._wanted.ask(key)
                return larger
        return key

    def _read_together(self, tree: TreeKey | None) -> int:
        """New tokens of a row that read its keys and values at once."""
        assert self._shape is not None
        if tree is not None or isinstance(self._attention, InvariantAttention):
            return 1
        return chunk_tile(self._shape.num_heads // self._shape.num_kv_heads).tokens

    def _key(self, tokens: int, wanted: int, *, decode: bool, tree: TreeKey | None) -> GraphKey:
        """The graph for so many tokens and logits, with rows as long as those of the last step."""
        assert self._shape is not None
        if isinstance(self._attention, InvariantAttention):
            return invariant_key(tokens, wanted, decode=decode)
        kv_heads = self._shape.num_kv_heads
        return graph_key(tokens, wanted, kv_heads=kv_heads, decode=decode, longest=self._longest, tree=tree)

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
        if plan.flags.penalized != plan.flags.biased:  # one kernel does both: rows have a slot for what they use
            plan = replace(plan, flags=replace(plan.flags, penalized=True, biased=True))
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
        self._forward = ForwardGraphs(forward, self._prepare_small, GraphPool(), capture=self._capture)
        return self._forward

    def capture_sample(self, sample: SampleFn) -> SampleFn:
        self._samples = SampleGraphs(sample, GraphPool(), capture=self._capture)
        return self._samples

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
        key = self._key(num_tokens, num_rows, decode=decode, tree=self._tree)
        if not decode and not self._forward.has(key):
            self._wanted.ask(key)
            return None
        return self._forward.seconds(key) or 0.0

    def compile_kernels(
        self, tables: RowTables, draws: Callable[[], None], facts: object, progress: Callable[[str], None]
    ) -> None:
        if self._attention is None or self._forward is None or self._samples is None:
            return
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        sizes = tables.page_size, tables.page_table.shape
        done = mark(folder, torch.cuda.get_device_capability(), type(self._attention), self._shape, sizes, facts)
        if done.exists():
            return
        progress("compiling kernels, once on this machine")
        self._tables, self._sampler.filters = tables, False
        try:
            with only_compiling(usable_cpus(), progress), self._forward.singly(), self._samples.singly():
                self._launch_forwards(self._forward, tables)
                draws()
        finally:
            self._sampler.filters = True
        folder.mkdir(parents=True, exist_ok=True)
        done.touch()

    def _launch_forwards(self, forward: ForwardGraphs, tables: RowTables) -> None:
        """Steps of all kinds, with numbers that mean nothing."""
        assert self._attention is not None and self._shape is not None
        max_rows, pages = tables.page_table.shape
        if isinstance(self._attention, CudaAttention):
            keys = keys_to_compile(self._shape.num_kv_heads, max_rows)
        else:
            keys = [invariant_key(n, n, decode=decode) for decode in (True, False) for n in SIZES]
        for key in keys:
            step = self._small_step(key)
            forward(small_batch(zeros(rows=1, tokens=key.tokens), step.views, tables, key, num_logits=key.logits))
        if importlib.util.find_spec("flashinfer") is None:
            return
        for rows, tokens, start in _LARGE_STEPS:
            if rows <= max_rows and start + tokens <= pages * tables.page_size:
                batch = zeros(rows=rows, tokens=tokens, start=start)
                large = send_large(batch, host_inputs(batch, tables.host_page_table, tables.page_size), tables)
                self._attention.plan(large)
                forward(large)

    def between_steps(self) -> None:
        """A capture within a step costs what launching the step does; one between steps holds all rows up."""
        key = self._wanted.take(idle=False)
        if key is not None:
            began = time.perf_counter()
            self._capture_ahead(key)
            self._wanted.spend(time.perf_counter() - began)

    def rest(self) -> bool:
        """A graph, or what only large steps and top-k, top-p and min-p need: FlashInfer, whose import takes seconds."""
        key = self._wanted.take(idle=True) or self._next_ahead()
        if key is not None:
            self._capture_ahead(key)
            return True
        if self._library is None and self._tables is not None:
            self._library = Thread(target=self._load_library, name="sglite-import")  # at exit it is waited for
            self._library.start()
        return False

    def _next_ahead(self) -> GraphKey | None:
        """None: all are there."""
        forward, tables = self._forward, self._tables
        if forward is None or tables is None or self._shape is None or not self._capture:
            return None
        if not isinstance(self._attention, CudaAttention):
            return None
        if self._ahead is None:
            self._ahead = deque(keys_ahead(self._shape.num_kv_heads, tables.page_table.shape[0]))
        while self._ahead:
            key = self._ahead.popleft()
            if not forward.has(key):
                return key
        return None

    def _capture_ahead(self, key: GraphKey) -> None:
        """Make the graph of a size from a step of nothing but padding."""
        if self._forward is None or self._tables is None:
            return
        with torch.inference_mode():
            step = self._small_step(key)
            batch = small_batch(zeros(rows=1, tokens=key.tokens), step.views, self._tables, key, num_logits=key.logits)
            self._forward.capture(batch)

    def _load_library(self) -> None:
        if importlib.util.find_spec("flashinfer") is None:
            return
        torch.cuda.set_device(self._index)
        if isinstance(self._attention, CudaAttention) and self._shape is not None and self._tables is not None:
            load_attention(self._shape, self.torch_device, page_size=self._tables.page_size)
        load_filters(self.torch_device)

    def _small_step(self, key: GraphKey) -> SmallStep:
        place = key.tokens, key.logits
        if place not in self._small:
            self._small[place] = SmallStep(key.tokens, key.logits, self.torch_device)
        return self._small[place]

    def _prepare_small(self, batch: CudaForwardBatch) -> None:
        assert self._tables is not None and batch.key is not None
        step = self._small[batch.key.tokens, batch.key.logits]
        launch_prepare(step.views, self._tables, programs=1 if batch.key.tokens <= 64 else 4)
