"""What a device must offer. One engine code path runs on all of them; the CPU is the reference for the tests.

The model runner (executor/) is written once. Per step it calls, in this order:

    device.prepare(batch, tables)           -> ForwardBatch    host numbers become device tensors
    attention.plan(forward_batch)
    forward(forward_batch)                  -> logits          forward = device.capture_forward(model.forward)
    device.prepare_sample(plan, masks)      -> SampleBatch
    sample(logits, sample_batch)            -> SampleOutput    sample = device.capture_sample(sampler.run)
    device.to_host(tensors)                 -> HostCopy        waited for at the earliest one step later

`capture_*` may wrap the function in captured graphs: it is pure in the tensors of its arguments, and which code
runs depends on host numbers in `ForwardBatch.batch` / `SampleBatch.flags` alone. A device that pads to captured
sizes pads in `prepare` and `prepare_sample` and cuts the results again in the wrapper.

Every operation has a portable torch twin (`cpu.py`, `executor/logits/`); tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import Batch, IntArray


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # usually head_dim ** -0.5
    dtype: torch.dtype  # of q, k, v and the cache

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(slots=True)
class KVCache:
    """Per layer k and v: [num_pages * page_size, num_kv_heads, head_dim]. Slot = page * page_size + offset.

    The layout in memory is the device's choice as long as it can be indexed like this.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int


@dataclass(slots=True)
class RowTables:
    """What the executor keeps per row. The host copy of the page table is always up to date when `prepare` is called;
    on the CPU both are the same memory, another device applies `batch.page_updates` to its own in `prepare`."""

    host_page_table: IntArray  # [max_rows, max_pages_per_row]
    page_table: torch.Tensor  # int32, same shape, on the device
    last_tokens: torch.Tensor  # int32[max_rows], on the device: what the sampler wrote last for each row
    page_size: int


@dataclass(slots=True)
class ForwardBatch:
    """A batch as device tensors. N rows, T new tokens, L logits positions.

    On a device with captured graphs these are views of persistent buffers, padded to the captured size.
    """

    batch: Batch
    token_ids: torch.Tensor  # int32[T], DEVICE_TOKEN already replaced on the device
    positions: torch.Tensor  # int32[T]
    slots: torch.Tensor  # int32[T] where each new token's KV goes
    page_table: torch.Tensor  # int32[max_rows, max_pages_per_row], the executor's own
    rows: torch.Tensor  # int32[N]
    starts: torch.Tensor  # int32[N]
    num_new: torch.Tensor  # int32[N]
    logits_index: torch.Tensor  # int32[L] which of the T tokens need logits
    host_page_table: IntArray  # the same table for planning on the host

    @property
    def selected(self) -> torch.Tensor | None:
        """logits_index, or None where every token's logits are wanted, in order. The host's numbers decide, as the
        padded shapes of a captured size can agree by chance."""
        return None if len(self.batch.mask_slots) == self.batch.num_tokens else self.logits_index


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm: x * rsqrt(mean(x ** 2) + eps) * weight over the last dimension, computed in float32."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a layer brings to its attention beside the tokens."""

    number: int  # under which the backend keeps its KV
    norms: tuple[Norm, Norm] | None  # of each head of q and k, before the rotation
    cos_sin: torch.Tensor  # float32[max_len, head_dim]: cos of a position's head_dim / 2 angles, then sin


class AttentionBackend(Protocol):
    """Paged attention over a KVCache. `plan` once per step, `attend` once per layer.

    May also have `shares_prefix_reads: bool` (absent: False): it makes use of Batch.shared_prefixes."""

    def plan(self, batch: ForwardBatch) -> None: ...

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Everything between the two projections of an attention block.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], q heads, then k heads, then v heads. Normalise each head
        of q and k where there are norms, rotate q and k (NeoX halves), write k and v of all new tokens into the batch's
        slots, then causal attention of each row over its positions 0 .. own. Returns [T, num_heads * head_dim]. May
        overwrite qkv.
        """
        ...


@runtime_checkable
class SelectiveAttention(Protocol):
    """An AttentionBackend that can leave out queries nobody reads the output of: in the last layer, all but those of
    the tokens in batch.logits_index (L of them)."""

    def leaves_out(self, batch: ForwardBatch) -> bool:
        """Whether that pays in this step. Then `append` and `attend_selected` are called instead of `attend`."""
        ...

    def keys_values(self, weight: PackedWeight) -> PackedWeight:
        """The part of a q, k, v projection that gives keys and values, in the same memory."""
        ...

    def append(self, layer: AttentionLayer, keys_values: torch.Tensor, batch: ForwardBatch) -> None:
        """keys_values: [T, 2 * num_kv_heads * head_dim]. The part of `attend` that fills the cache."""
        ...

    def attend_selected(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """qkv: [L, (num_heads + 2 * num_kv_heads) * head_dim] -> [L, num_heads * head_dim]."""
        ...


PackedWeight = Any  # what LayerOps.pack made; only the same device's operations look inside


class LayerOps(Protocol):
    """What a decoder layer is made of, in pieces that a device can carry out as one kernel each. T rows everywhere."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """The layout in which the projections want weight  # [out, in]. Called once per weight after loading. May be
        the weight itself; must not keep it alive otherwise."""
        ...

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        """`pack` for an output projection that is also the embedding: with it comes a tensor of the same content for
        the look-up  # [out, in], of any strides, which may share memory with the packed weight."""
        ...

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """norm(x  # [T, in]) @ weight.T + bias -> [T, out]. x stays as it is."""
        ...

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: PackedWeight) -> torch.Tensor:
        """With gate, up = the halves of norm(x) @ weight.T  # [T, 2 * I]: silu(gate) * up -> [T, I]. x stays."""
        ...

    def linear_add(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """residual + x @ weight.T + bias -> [T, out]. May be written into residual, which is not used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SampleFlags:
    """Which parts of the sampler a step needs. Small and hashable: the key of a captured graph."""

    masked: bool  # some draw has a bitmask
    random: bool  # some temperature > 0
    filtered: bool  # some random draw has top-k, top-p or min-p
    penalized: bool  # some draw has penalties: `extra_slots` and the count arrays are in use
    biased: bool  # some draw has a logit bias
    drafts: bool  # some row has drafts to verify


@dataclass(slots=True)
class SamplePlan:
    """The draws of a step as host numbers: R sampling rows, S draws (one per row, plus one per draft).

    A row's draws stand side by side. With drafts d1 .. dn of a row, draw j gives the token after j accepted drafts;
    a draft is accepted while it equals the draw at its place. As a draw is an exact sample of the distribution there,
    that is rejection sampling for a point-mass draft, and the text is the one that the seed gives without drafts.
    """

    flags: SampleFlags
    rows: IntArray  # [R] row index in the executor's tables
    first_draw: IntArray  # [R] into the S draws
    num_draws: IntArray  # [R] drafts + 1
    logits_index: IntArray  # [S] which of the L logits rows
    draw_rows: IntArray  # [S] row index in the executor's tables
    draft_ids: IntArray  # [S] the draft that this draw must equal for the row to go on; -1 at a row's last
    mask_index: IntArray  # [S] row of the bitmask buffer, or -1
    keys: IntArray  # [S, 2] of the counter-based noise, see executor/logits/noise.py (uint32 bits)
    temperature: NDArray[np.float32]  # [S] 0: greedy
    top_p: NDArray[np.float32]  # [S] 1: off
    min_p: NDArray[np.float32]  # [S] 0: off
    top_k: IntArray  # [S] vocab_size: off
    # only where flags.penalized or flags.biased:
    presence: NDArray[np.float32]  # [S]
    frequency: NDArray[np.float32]  # [S]
    repetition: NDArray[np.float32]  # [S] 1: off
    count_slots: IntArray  # [S] row of the `counts` table, or -1
    bias_slots: IntArray  # [S] row of the `bias` table, or -1


@dataclass(slots=True)
class SampleBatch:
    """A SamplePlan on the device, field by field (int32 and float32 tensors), and what belongs to it."""

    flags: SampleFlags
    plan: SamplePlan
    rows: torch.Tensor
    first_draw: torch.Tensor
    num_draws: torch.Tensor
    logits_index: torch.Tensor
    draw_rows: torch.Tensor
    draft_ids: torch.Tensor
    mask_index: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    count_slots: torch.Tensor
    bias_slots: torch.Tensor
    masks: torch.Tensor  # int32[mask rows, words]
    counts: torch.Tensor  # int32[slots, vocab]: output count, plus SEEN_IN_PROMPT where the prompt has the token
    bias: torch.Tensor  # float32[slots, vocab]
    last_tokens: torch.Tensor  # int32[max_rows], written by `sample`


PLAN_ARRAYS = tuple(
    field.name for field in fields(SamplePlan) if field.name != "flags"
)  # the arrays of a SamplePlan, which SampleBatch has as tensors under the same names

# in SampleBatch.counts: added once to the count of a token that occurs in the prompt
SEEN_IN_PROMPT = 1 << 24

# values of SampleOutput.status
STATUS_OK = 0
STATUS_NAN = 1  # a logit is NaN, or all are -inf before the mask
STATUS_EMPTY_MASK = 2  # the mask leaves no token


@dataclass(slots=True)
class SampleOutput:
    tokens: torch.Tensor  # int32[S] the draws; those behind the accepted ones have no meaning
    num_accepted: torch.Tensor  # int32[R] 1 + accepted drafts
    status: torch.Tensor  # int32[S]


class SamplerOps(Protocol):
    """The two ends of the sampler that a device may fuse. Twins: executor/logits/. Logits may be any float type and
    have a row stride larger than the vocabulary; the last dimension is the vocabulary, already cut to its true size."""

    def draw(self, logits: torch.Tensor, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """All S draws: bias, penalties, mask, temperature, top-k, top-p, min-p, Gumbel-max with the noise of `keys`
        (ties: the lowest id). logits: [L, vocab]. Returns (tokens int32[S], status int32[S]).
        The logits stay as they are: log probabilities come from them afterwards."""
        ...

    def verify(self, tokens: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """num_accepted int32[R]; writes each row's last accepted token to `batch.last_tokens[batch.rows]` and,
        where flags.penalized, adds the accepted tokens to `batch.counts`."""
        ...


class HostCopy(Protocol):
    def wait(self) -> Mapping[str, NDArray[Any]]:
        """Block until the copy that was queued is there. May be called again; same arrays."""
        ...


ForwardFn = Callable[[ForwardBatch], torch.Tensor]  # -> logits [L, padded vocab]
SampleFn = Callable[[torch.Tensor, SampleBatch], SampleOutput]


class Device(Protocol):
    name: str  # "cpu", "cuda:0"
    torch_device: torch.device
    ops: LayerOps
    overlaps: bool  # it works while the host goes on

    def free_memory(self) -> int:
        """Bytes that the KV pool may be sized from."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor in host memory from which `prepare_sample` can copy without waiting (pinned)."""
        ...

    def kept_mask_rows(self, words: int) -> int:
        """Masks of that many words that `prepare_sample` can keep; 0: none, it is no gain."""
        ...

    def caught_up(self) -> bool:
        """Everything that was queued so far is done."""
        ...

    def make_kv_cache(self, shape: AttentionShape, *, num_pages: int, page_size: int) -> KVCache: ...

    def make_attention(self, shape: AttentionShape, cache: KVCache) -> AttentionBackend: ...

    def sampler_ops(self) -> SamplerOps | None:
        """Fused sampler kernels, or None: the portable ones in executor/logits."""
        ...

    def prepare(self, batch: Batch, tables: RowTables) -> ForwardBatch: ...

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
        """host_masks: the step's mask buffer, from `host_buffer`; only the rows in plan.mask_index need copying.
        It stays untouched until the next but one step's result is waited for. kept_masks: (row of it, place that
        keeps it); plan.mask_index names place p as len(host_masks) + p. The step before is over by now."""
        ...

    def capture_forward(self, forward: ForwardFn) -> ForwardFn: ...

    def capture_sample(self, sample: SampleFn) -> SampleFn: ...

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> HostCopy:
        """Queue copies to the host behind the work queued so far."""
        ...

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        """See Executor."""
        ...

    def compile_kernels(
        self, tables: RowTables, draws: Callable[[], None], facts: object, progress: Callable[[str], None]
    ) -> None:
        """Compile what steps may need, if this machine has not yet: it would take seconds in the middle of a step.
        `draws()` goes through the kinds of draws, forwards included, of which only the launches matter. `facts`: of the
        model, whose repr tells kernels of other sizes apart. `progress` is told how far it is."""
        ...

    def between_steps(self) -> None:
        """A step has been queued: time for a little of what later steps would have to wait for."""
        ...

    def rest(self) -> bool:
        """Nobody asks for anything just now: time for a little of what a later request would have to wait for, some
        10 ms. True: there is more of it; then it is called again soon."""
        ...
