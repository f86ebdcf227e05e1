"""Paged attention on the CPU, made of few large torch operations.

The rows of a step are cut into parts that are computed alike:

    narrow   few new tokens (decode, drafts, forced text). Rows whose page tables begin alike form a family: its
             prefix is read once for all their queries, as one dense attention. What follows is gathered for several
             rows of similar length at a time, padded and masked, small enough to stay in the cache.
    wide     many new tokens (prefill): all cached tokens without a mask, then the new ones among themselves, causal.

A query meets its keys in up to two pieces; (output, log-sum-exp) of each are merged exactly:
out = out_1 + (out_2 - out_1) * sigmoid(lse_2 - lse_1).

Query heads that share a KV head are folded into the query length, so keys are never repeated. Keys are read in
place where a piece's slots are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import IntArray
from sglite.runtime.device.base import AttentionLayer, AttentionShape, ForwardBatch, KVCache, Norm

NARROW = 16  # new tokens up to which a row is padded together with others
GATHER_BYTES = 2 << 20  # of keys and values at a time: they are read again at once and should be in the cache then
MIN_PREFIX = 32  # tokens; below, reading a shared prefix once saves less than the merge costs
PADDING = 1.5  # longest by shortest row of a part

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class CpuKVCache(KVCache):
    """`kv`: per layer [slots, 2 * num_kv_heads, head_dim], key heads then value heads; `k` and `v` are views of it."""

    kv: list[torch.Tensor]


Piece = slice | torch.Tensor  # slots of keys: consecutive, or to be gathered


@dataclass(frozen=True, slots=True)
class Tail:
    """The own tokens of some narrow rows, padded to one length. N rows of up to M new tokens and up to S own ones."""

    tokens: torch.Tensor  # int64[N * M] which of the step's tokens; padding repeats the row's last
    rows: int  # N
    slots: Piece  # N * S
    mask: torch.Tensor | None  # float[N, 1, M * group, S], added to the scores


@dataclass(frozen=True, slots=True)
class Family:
    """Narrow rows that share their first tokens (prefix None: they do not)."""

    prefix: Piece | None
    tails: list[Tail]
    tokens: torch.Tensor | None  # int64[Q] the tokens of all tails, one after the other; None: all of the step's


@dataclass(frozen=True, slots=True)
class Wide:
    first: int  # of the step's tokens
    last: int
    past: Piece | None


@dataclass(slots=True)
class StepBuffers:
    """What all layers of a step write to, with the views that they use: a view costs as much as a small operation.

    T tokens. Outputs are kept as [tokens, group, kv_heads, head_dim], the order in which the kernel writes them.
    """

    qkv: torch.Tensor  # [T, heads + 2 * kv_heads, head_dim], rotated
    queries: torch.Tensor  # [T, kv_heads, group, head_dim], view of qkv
    keys_values: torch.Tensor  # [T, 2 * kv_heads, head_dim], view of qkv
    out: torch.Tensor  # [T, heads * head_dim]
    out_by_group: torch.Tensor  # [T, group, kv_heads, head_dim], view of out
    slots: torch.Tensor  # int64[T]
    cos: torch.Tensor | None = None  # [T, heads + 2 * kv_heads, head_dim]; 1 for the value heads
    sin: torch.Tensor | None = None  # the same, with -sin in the first half of a head; 0 for the value heads


class CpuAttention:
    def __init__(self, shape: AttentionShape, cache: CpuKVCache) -> None:
        self._shape = shape
        self._cache = cache
        self._group = shape.num_heads // shape.num_kv_heads
        self._families: list[Family] = []
        self._wide: list[Wide] = []
        self._buffers = self._make_buffers(torch.zeros(1, dtype=torch.int64))

    # -- planning, on the host

    def plan(self, batch: ForwardBatch) -> None:
        plan = batch.batch
        self._buffers = self._make_buffers(batch.slots.long())
        first = np.cumsum(plan.num_new) - plan.num_new
        narrow = np.flatnonzero(plan.num_new <= NARROW)
        wide = np.flatnonzero(plan.num_new > NARROW)
        rows = _Rows(batch.host_page_table, self._cache.page_size, plan.rows, plan.starts, plan.num_new, first)
        self._wide = [self._plan_wide(rows, int(i)) for i in wide]
        self._families = [self._plan_family(rows, members, prefix) for members, prefix in families(rows, narrow)]

    def _make_buffers(self, slots: torch.Tensor) -> StepBuffers:
        shape, count = self._shape, slots.shape[0]
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = torch.empty((count, heads + 2 * kv_heads, dim), dtype=shape.dtype)
        out = torch.empty((count, heads * dim), dtype=shape.dtype)
        return StepBuffers(
            qkv=qkv,
            queries=qkv[:, :heads].unflatten(1, (kv_heads, self._group)),
            keys_values=qkv[:, heads:],
            out=out,
            out_by_group=out.view(count, kv_heads, self._group, dim).transpose(1, 2),
            slots=slots,
        )

    def _plan_wide(self, rows: _Rows, i: int) -> Wide:
        first, start = int(rows.first[i]), int(rows.starts[i])
        past = _piece(rows.slots(i, 0, start)) if start else None
        return Wide(first, first + int(rows.num_new[i]), past)

    def _plan_family(self, rows: _Rows, members: NDArray[np.int64], prefix: int) -> Family:
        lengths = rows.starts[members] + rows.num_new[members] - prefix
        order = np.argsort(lengths, kind="stable")
        token_bytes = 2 * self._shape.num_kv_heads * self._shape.head_dim * self._shape.dtype.itemsize
        tails = []
        for part in cut_by_length(lengths[order], max(1, GATHER_BYTES // token_bytes)):
            tails.append(self._plan_tail(rows, members[np.sort(order[part])], prefix))
        piece = _piece(rows.slots(int(members[0]), 0, prefix)) if prefix else None
        tokens = torch.cat([tail.tokens for tail in tails])
        count = self._buffers.slots.shape[0]
        in_order = tokens.shape[0] == count and torch.equal(tokens, torch.arange(count))
        return Family(piece, tails, None if in_order else tokens)

    def _plan_tail(self, rows: _Rows, members: NDArray[np.int64], prefix: int) -> Tail:
        new, lengths = rows.num_new[members], rows.starts[members] + rows.num_new[members] - prefix
        width, longest = int(new.max()), int(lengths.max())
        rank = np.minimum(np.arange(width), new[:, None] - 1)  # [N, M]
        tokens = rows.first[members][:, None] + rank
        positions = np.arange(longest)
        if len(members) == 1:
            slots = _piece(rows.slots(int(members[0]), prefix, prefix + longest))
        else:
            within = np.minimum(positions, lengths[:, None] - 1)  # padding reads the row's last slot again
            slots = torch.from_numpy(rows.slots_at(members[:, None], prefix + within).ravel())
        mask = None
        if width > 1 or int(lengths.min()) < longest:
            visible = rows.starts[members][:, None] - prefix + rank  # [N, M] last visible position
            hidden = positions > visible[:, :, None]  # [N, M, S]
            mask = torch.zeros(hidden.shape, dtype=self._shape.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask[:, None, :, None].expand(-1, -1, -1, self._group, -1).flatten(2, 3)
        return Tail(torch.from_numpy(tokens.ravel().astype(np.int64)), len(members), slots, mask)

    # -- a layer

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers, cache, norms = self._buffers, self._cache.kv[layer.number], layer.norms
        parts = qkv.view(buffers.qkv.shape)
        if norms is not None:
            heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
            _normalise(parts[:, :heads], norms[0])
            _normalise(parts[:, heads : heads + kv_heads], norms[1])
        self._rotate(parts, layer.cos_sin, batch)
        cache.index_copy_(0, buffers.slots, buffers.keys_values)
        for family in self._families:
            self._family(family, cache)
        for wide in self._wide:
            self._prefill(wide, cache)
        return buffers.out

    def _rotate(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> None:
        """Into the buffer: x * [cos, cos] + swapped halves * [-sin, sin]. The factors serve all layers of a step."""
        buffers = self._buffers
        if buffers.cos is None or buffers.sin is None:
            rotated = self._shape.num_heads + self._shape.num_kv_heads
            cos, sin = cos_sin[batch.positions].to(x.dtype)[:, None].chunk(2, dim=-1)
            buffers.cos, buffers.sin = torch.ones_like(buffers.qkv), torch.zeros_like(buffers.qkv)
            buffers.cos[:, :rotated] = torch.cat((cos, cos), -1)
            buffers.sin[:, :rotated] = torch.cat((-sin, sin), -1)
        torch.mul(x, buffers.cos, out=buffers.qkv)
        buffers.qkv.addcmul_(x.roll(x.shape[-1] // 2, dims=-1), buffers.sin)

    def _family(self, family: Family, cache: torch.Tensor) -> None:
        buffers = self._buffers
        queries = buffers.queries if family.tokens is None else buffers.queries.index_select(0, family.tokens)
        done = 0
        outs, sums = [], []
        for tail in family.tails:
            count = tail.tokens.shape[0]
            mine = queries if count == queries.shape[0] else queries[done : done + count]
            out, total = self._tail(tail, mine, cache)
            outs.append(out)
            sums.append(total)
            done += count
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if family.prefix is not None:
            total = sums[0] if len(sums) == 1 else torch.cat(sums)
            folded = queries.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, Q * group, head_dim]
            before, before_total = self._attend(folded, *self._read(cache, family.prefix, 1))
            out = _merge(out, total, before.view(out.shape), before_total.view(total.shape))
        if family.tokens is None:
            buffers.out_by_group.copy_(out)
        else:
            buffers.out_by_group.index_copy_(0, family.tokens, out)

    def _tail(self, tail: Tail, queries: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [N * M, group, kv_heads, head_dim], log-sum-exp [N * M, group, kv_heads]) over the own tokens.
        queries: [N * M, kv_heads, group, head_dim]."""
        keys, values = self._read(cache, tail.slots, tail.rows)
        count = queries.shape[0]
        folded = queries
        if count > tail.rows:
            folded = queries.unflatten(0, (tail.rows, -1)).transpose(1, 2).flatten(2, 3)
        out, total = self._attend(folded, keys, values, mask=tail.mask)  # [N, M * group, kv_heads, head_dim]
        if count > tail.rows:
            out, total = (part.reshape(count, self._group, *part.shape[2:]) for part in (out, total))
        return out, total

    def _prefill(self, wide: Wide, cache: torch.Tensor) -> None:
        """One row's M new tokens."""
        buffers, kv_heads = self._buffers, self._shape.num_kv_heads
        folded = buffers.queries[wide.first : wide.last].permute(2, 1, 0, 3)  # [group, kv_heads, M, head_dim]
        own = buffers.keys_values[wide.first : wide.last].transpose(0, 1).expand(self._group, -1, -1, -1)
        out, total = self._attend(folded, own[:, :kv_heads], own[:, kv_heads:], causal=True)
        if wide.past is not None:
            keys, values = self._read(cache, wide.past, 1)
            keys, values = (part.expand(self._group, -1, -1, -1) for part in (keys, values))
            out = _merge(out, total, *self._attend(folded, keys, values))
        buffers.out_by_group[wide.first : wide.last] = out.transpose(0, 1)  # [M, group, kv_heads, head_dim]

    def _read(self, cache: torch.Tensor, piece: Piece, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of N rows' slots, each [N, kv_heads, S, head_dim]."""
        found = cache[piece] if isinstance(piece, slice) else cache.index_select(0, piece)
        found = found.view(rows, -1, *found.shape[1:]).transpose(1, 2)
        keys, values = found.split(self._shape.num_kv_heads, dim=1)
        return keys, values

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, queries, dim] over [B, heads, keys, dim] -> (output [B, queries, heads, dim], log-sum-exp
        [B, queries, heads])."""
        out, total = _flash(queries, keys, values, 0.0, causal, attn_mask=mask, scale=self._shape.scale)
        return out.transpose(1, 2), total.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The step's rows as the planner reads them."""

    page_table: IntArray  # [max_rows, pages]
    page_size: int
    rows: IntArray  # [N]
    starts: IntArray
    num_new: IntArray
    first: IntArray  # of the step's tokens

    def slots(self, i: int, start: int, end: int) -> NDArray[np.int64]:
        """Of row i's positions start .. end - 1."""
        return self.slots_at(np.int64(i), np.arange(start, end))

    def slots_at(self, i: NDArray[np.int64] | np.int64, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        pages = self.page_table[self.rows[i], positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size


def families(rows: _Rows, narrow: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int]]:
    """Rows that begin with the same pages, and how many tokens they share (0: alone or too few to matter).

    Shared are only tokens before every member's new ones: those no mask can concern.
    """
    starts = rows.starts[narrow]
    candidates = narrow[starts >= MIN_PREFIX]
    loose = [narrow[starts < MIN_PREFIX]]
    found: list[tuple[NDArray[np.int64], int]] = []
    heads = rows.page_table[rows.rows[candidates], 0]
    for head in np.unique(heads):
        members = candidates[heads == head]
        prefix = _common_prefix(rows, members) if len(members) > 1 else 0
        if prefix >= MIN_PREFIX:
            found.append((members, prefix))
        else:
            loose.append(members)
    rest = np.sort(np.concatenate(loose))
    return found + [(rest, 0)] if len(rest) else found


def _common_prefix(rows: _Rows, members: NDArray[np.int64]) -> int:
    """Tokens on whole pages that all members have in common."""
    pages = int(rows.starts[members].min()) // rows.page_size
    table = rows.page_table[rows.rows[members], :pages]
    differs = (table != table[0]).any(axis=0)
    return (int(differs.argmax()) if differs.any() else pages) * rows.page_size


def cut_by_length(lengths: NDArray[np.int64], most: int) -> list[slice]:
    """Spans of sorted lengths: each padded to its longest has at most `most` tokens (or is one row), and the longest
    is at most PADDING times the shortest."""
    spans, first = [], 0
    for i in range(1, len(lengths)):
        if lengths[i] > PADDING * lengths[first] + MIN_PREFIX or int(lengths[i]) * (i + 1 - first) > most:
            spans.append(slice(first, i))
            first = i
    return [*spans, slice(first, len(lengths))]


def _piece(slots: NDArray[np.int64]) -> Piece:
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and (len(slots) < 3 or bool((np.diff(slots) == 1).all())):
        return slice(first, last + 1)
    return torch.from_numpy(slots)


def _merge(a: torch.Tensor, a_total: torch.Tensor, b: torch.Tensor, b_total: torch.Tensor) -> torch.Tensor:
    """The attention over both sets of keys, from the outputs and the log-sum-exps over each."""
    return torch.lerp(a, b, (b_total - a_total).sigmoid_().to(a.dtype)[..., None])


def _normalise(x: torch.Tensor, norm: Norm) -> None:
    """In place, over the last dimension of x  # [T, heads, head_dim]."""
    x.copy_(torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps))
