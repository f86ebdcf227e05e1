"""The CPU: the fallback everywhere and the reference for the other devices' tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.errors import InvalidRequest
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
    Norm,
    PackedWeight,
    RowTables,
    SampleBatch,
    SampleFn,
    SamplePlan,
    SamplerOps,
)
from sglite.runtime.device.cpu_attention import CpuAttention, CpuKVCache
from sglite.runtime.device.cpu_weights import (
    CpuWeight,
    Int8Weight,
    OneDnnWeight,
    PlainWeight,
    SingleRowWeight,
    can_pack,
)
from sglite.runtime.device.inputs import host_inputs
from sglite.runtime.device.memory import available_memory
from sglite.runtime.device.threads import usable_cpus

if TYPE_CHECKING:
    from sglite.runtime.device.cpu_compiled import CompiledKernels

logger = logging.getLogger(__name__)


class CpuOps:
    """The layer operations in torch. `copy_bytes`: memory that second copies of float32 weights may take in all."""

    def __init__(self, *, copy_bytes: int, int8: bool = False) -> None:
        self._eps: dict[float, torch.Tensor] = {}
        self._int8 = int8
        self._copy_bytes = copy_bytes

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return self.pack_tied(weight)[0]

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        if self._int8:
            return Int8Weight(weight), weight
        if not can_pack(weight):
            return PlainWeight(weight), weight
        if weight.nbytes > self._copy_bytes:
            return OneDnnWeight(weight, None), weight
        self._copy_bytes -= weight.nbytes
        single = SingleRowWeight(weight)
        return OneDnnWeight(weight, single), single.columns.t()

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: CpuWeight, bias: torch.Tensor | None) -> torch.Tensor:
        return weight.linear(self._rms_norm(x, norm), bias)

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: CpuWeight) -> torch.Tensor:
        gate, up = weight.linear(self._rms_norm(x, norm), None).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    def linear_add(
        self, x: torch.Tensor, weight: CpuWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        return weight.linear_add(x, bias, residual)

    def _rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """As torch's, in half of the operations for float32. Streaming the weights empties the caches, so that each
        small operation between two projections costs 4 to 10 us whatever it does."""
        if x.dtype != torch.float32:
            return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        eps = self._eps.get(norm.eps)
        if eps is None:
            eps = self._eps[norm.eps] = torch.full((1,), norm.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale).mul_(norm.weight)


def load_kernels(threads: int) -> CompiledKernels | None:
    """None where numba is not installed, as for a Python that is newer than it, or switched off."""
    try:
        from sglite.runtime.device.cpu_compiled import CompiledKernels  # brings numba in, which takes half a second
    except ImportError as error:
        hint = "; pip install numba" if isinstance(error, ModuleNotFoundError) else ""
        logger.warning("no compiled CPU kernels (%s): float32 runs at about half of its speed%s", error, hint)
        return None
    return CompiledKernels(threads)


class ReadyCopy:
    """The CPU's results are on the host already."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def wait(self) -> Mapping[str, NDArray[Any]]:
        return self._arrays


class CpuDevice:
    """`num_threads` None: what affinity and control group allow. `int8`: projections keep 8 bits a weight. `compiled`:
    use the compiled kernels for float32, where numba is installed."""

    name = "cpu"
    overlaps = False
    ops: LayerOps

    def __init__(self, num_threads: int | None = None, *, int8: bool = False, compiled: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        # torch starts with OMP_NUM_THREADS or the cores of the host, whatever the control group allows
        torch.set_num_threads(num_threads or min(torch.get_num_threads(), usable_cpus()))
        plain = CpuOps(copy_bytes=available_memory() // 4, int8=int8)
        self._kernels = load_kernels(torch.get_num_threads()) if compiled else None
        self.ops = plain if int8 or self._kernels is None else self._kernels.ops(plain)

    def free_memory(self) -> int:
        return available_memory()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def kept_mask_rows(self, words: int) -> int:
        return 0

    def caught_up(self) -> bool:
        return True

    def make_kv_cache(self, shape: AttentionShape, *, num_pages: int, page_size: int) -> KVCache:
        heads = shape.num_kv_heads
        size = (num_pages * page_size, 2 * heads, shape.head_dim)
        kv = [_lazy_zeros(size, shape.dtype) for _ in range(shape.num_layers)]
        return CpuKVCache([x[:, :heads] for x in kv], [x[:, heads:] for x in kv], page_size, kv)

    def make_attention(self, shape: AttentionShape, cache: KVCache) -> AttentionBackend:
        assert isinstance(cache, CpuKVCache)
        if self._kernels is not None and shape.dtype == torch.float32:
            return self._kernels.attention(shape, cache)
        return CpuAttention(shape, cache)

    def sampler_ops(self) -> SamplerOps | None:
        return None

    def prepare(self, batch: Batch, tables: RowTables) -> ForwardBatch:
        inputs = host_inputs(batch, tables.host_page_table, tables.page_size)
        token_ids = torch.from_numpy(batch.token_ids)
        last = tables.last_tokens[torch.from_numpy(inputs.token_rows)]
        return ForwardBatch(
            batch=batch,
            token_ids=torch.where(token_ids < 0, last, token_ids),
            positions=torch.from_numpy(inputs.positions),
            slots=torch.from_numpy(inputs.slots),
            page_table=tables.page_table,
            rows=torch.from_numpy(batch.rows),
            starts=torch.from_numpy(batch.starts),
            num_new=torch.from_numpy(batch.num_new),
            logits_index=torch.from_numpy(inputs.logits_index),
            host_page_table=tables.host_page_table,
        )

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
            **{name: torch.from_numpy(getattr(plan, name)) for name in PLAN_ARRAYS},
            masks=host_masks,
            counts=counts,
            bias=bias,
            last_tokens=last_tokens,
        )

    def capture_forward(self, forward: ForwardFn) -> ForwardFn:
        return forward

    def capture_sample(self, sample: SampleFn) -> SampleFn:
        return sample

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> ReadyCopy:
        return ReadyCopy({name: np.asarray(tensor) for name, tensor in tensors.items()})

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        """Not measured: a step waits for nothing here."""
        return 0.0

    def compile_kernels(
        self, tables: RowTables, draws: Callable[[], None], facts: object, progress: Callable[[str], None]
    ) -> None:
        """There are none."""

    def between_steps(self) -> None:
        """There is nothing to prepare."""

    def rest(self) -> bool:
        """There is nothing that it would have to load later."""
        return False


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory is taken as it is first written: numpy's zeros is calloc, torch's writes. A large pool costs nothing while
    it is empty."""
    return torch.from_numpy(np.zeros((*size[:-1], size[-1] * dtype.itemsize), np.uint8)).view(dtype)


def make(name: str, config: EngineConfig) -> CpuDevice:
    """For the registry. Raises InvalidRequest for what only a GPU can do."""
    if name != "cpu":
        raise InvalidRequest(f"no device {name!r}: there is one CPU; use device='cpu' and num_threads", param="device")
    if config.deterministic:
        raise InvalidRequest(
            "deterministic=True is made for a GPU in bfloat16 or float16. On the CPU float32 already gives the same "
            "greedy text alone and in a batch, from the cache and in chunks, except where the two best tokens are "
            "within about 1e-4; leave the option out",
            param="deterministic",
        )
    return CpuDevice(config.num_threads, int8=config.dtype == "int8")
