"""Attention for rows that share a prefix: the prefix is read once for all of them, each row's suffix by itself.

    position   0 ................. prefix ................. start
               | read by an item    | read by the row       | new token, in place already
               | for all its rows   | (suffix kernel)               |

The prefix kernel takes one item: one part of one prefix, for as many rows as fit a tile of queries, all query heads of
a KV head side by side, so that scores and outputs are tensor-core products. The suffix kernel takes one part of what
follows one row's prefix. Both leave outputs and the log2 of their normalisers; the merge kernel weights one by the
other (log-sum-exp). A row without a prefix has no items.

Before them `norm_rope_append_kernel` leaves rotated queries, and new keys and values in their slots. The prefix kernel
lets its successor start only after its own wait, when all that is complete. So the suffix kernel reads it (around L1,
which may hold what stood there before) beside the prefix kernel, which leaves the memory's bandwidth mostly unused,
without waiting for it: only its very last program does, so that its end implies the end of both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def attend_scaled(q, k, v, live, scale, top, total, acc):
    """One step of online softmax, in powers of 2, with scores multiplied by `scale` on the way."""
    s = tl.dot(q, tl.trans(k))
    s = tl.where(live[None, :], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def prefix_attention_kernel(
    q_ptr,  # [N, HQ, D], rotated
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    members_ptr,  # int32: indices into the N rows, those of an item side by side
    items_ptr,  # int32[items, 8]: first member, members (0: nothing to do), row of the page table, begin, end
    part_ptr,  # [items, HKV, BLOCK_M, D]
    stat_ptr,  # float32[items, HKV, BLOCK_M]: log2 of the normaliser
    table_stride,
    scale,  # log2(e) * the softmax scale
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head; an item has at most BLOCK_M // GROUP members
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (items, HKV)."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(items_ptr + item * 8 + 1)
    if count == 0:
        if PDL:
            gdc_wait()
        return
    first_member = tl.load(items_ptr + item * 8)
    table = table_ptr + tl.load(items_ptr + item * 8 + 2).to(tl.int64) * table_stride
    begin = tl.load(items_ptr + item * 8 + 3)
    end = tl.load(items_ptr + item * 8 + 4)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK_T)
    live = m // GROUP < count
    n = tl.load(members_ptr + first_member + m // GROUP, mask=live, other=0)
    q_tile = q_ptr + ((n * HKV + head) * GROUP + m % GROUP)[:, None].to(tl.int64) * D + d[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    q = tl.load(q_tile, mask=live[:, None], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole = begin + (end - begin) // BLOCK_T * BLOCK_T
    for t0 in tl.range(begin, whole, BLOCK_T, num_stages=STAGES):
        page = tl.load(table + (t0 + t) // PAGE_SIZE).to(tl.int64)
        at = ((page * PAGE_SIZE + (t0 + t) % PAGE_SIZE) * HKV + head) * D
        k = tl.load(k_ptr + at[:, None] + d[None, :])
        v = tl.load(v_ptr + at[:, None] + d[None, :])
        s = tl.dot(q, tl.trans(k))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    if whole < end:
        valid = whole + t < end
        page = tl.load(table + (whole + t) // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        at = ((page * PAGE_SIZE + (whole + t) % PAGE_SIZE) * HKV + head) * D
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        top, total, acc = attend_scaled(q, k, v, valid, scale, top, total, acc)

    place = (item * HKV + head) * BLOCK_M + m
    tl.store(stat_ptr + place, top + tl.log2(total), mask=live)
    part = (acc / total[:, None]).to(part_ptr.dtype.element_ty)
    tl.store(part_ptr + place[:, None] * D + d[None, :], part, mask=live[:, None])


@triton.jit
def suffix_attention_kernel(
    q_ptr,  # [N, HQ, D], rotated
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[N]
    positions_ptr,  # int32[N] of the new token; negative: padding
    shares_ptr,  # int32[N, 4]: tokens of the shared prefix; the rest is for the merge
    part_ptr,  # [N, SPLITS, HQ, D]
    stat_ptr,  # float32[N, SPLITS, HQ]: log2 of the normaliser, -inf where a part has no tokens
    table_stride,
    scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP rounded up to at least 16
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,  # of each row's suffix
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, SPLITS, HKV)."""
    HQ: tl.constexpr = HKV * GROUP
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    d = tl.arange(0, D)
    g = tl.arange(0, BLOCK_G)
    t = tl.arange(0, BLOCK_T)

    tokens = tl.load(positions_ptr + n) + 1
    prefix = tl.load(shares_ptr + n * 4)
    table = table_ptr + tl.load(rows_ptr + n).to(tl.int64) * table_stride
    heads = head * GROUP + g
    q_tile = q_ptr + (n * HQ + heads).to(tl.int64)[:, None] * D + d[None, :]
    q = tl.load(q_tile, mask=(g < GROUP)[:, None], other=0.0, cache_modifier=".cg")
    chunk = tl.cdiv(tl.cdiv(tokens - prefix, SPLITS), BLOCK_T) * BLOCK_T
    begin = prefix + split * chunk
    end = tl.minimum(begin + chunk, tokens)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for t0 in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        live = t0 + t < end
        page = tl.load(table + (t0 + t) // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        at = ((page * PAGE_SIZE + (t0 + t) % PAGE_SIZE) * HKV + head) * D
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
        top, total, acc = attend_scaled(q, k, v, live, scale, top, total, acc)

    place = (n * SPLITS + split) * HQ + heads
    total = tl.where(begin < end, total, 1.0)  # top is -inf then
    tl.store(stat_ptr + place, top + tl.log2(total), mask=g < GROUP)
    part = (acc / total[:, None]).to(part_ptr.dtype.element_ty)
    tl.store(part_ptr + place[:, None] * D + d[None, :], part, mask=(g < GROUP)[:, None])
    last = (n == tl.num_programs(0) - 1) & (split == SPLITS - 1) & (head == HKV - 1)
    if PDL and last:  # the others make room at once: that they are over says nothing about the kernel before
        gdc_wait()


@triton.jit
def merge_kernel(
    positions_ptr,  # int32[N]; negative: padding
    shares_ptr,  # int32[N, 4]: -, first item, items, the row's place in each
    part_ptr,  # [N, SPLITS, HQ, D]
    stat_ptr,  # float32[N, SPLITS, HQ]
    prefix_part_ptr,  # [items, HKV, BLOCK_M, D]
    prefix_stat_ptr,  # float32[items, HKV, BLOCK_M]
    out_ptr,  # [N, HQ * D]
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP rounded up to a power of 2
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN: tl.constexpr,  # parts of the suffix that are read at a time
    CHUNK: tl.constexpr,  # items that are read at a time
    PDL: tl.constexpr,
):
    """Each head's output over its row's suffix and prefix, weighted by their normalisers. Grid (N, HKV)."""
    HQ: tl.constexpr = HKV * GROUP
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + n)
    first_item = tl.load(shares_ptr + n * 4 + 1)
    items = tl.load(shares_ptr + n * 4 + 2)
    place = tl.load(shares_ptr + n * 4 + 3)
    if PDL:
        gdc_wait()
    if position < 0:
        return
    g = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    i = tl.arange(0, CHUNK)[:, None]
    heads = head * GROUP + g
    real = g < GROUP
    top = tl.full([HEADS], -1.0e30, tl.float32)  # finite, for heads that are padding
    total = tl.where(real, 0.0, 1.0)
    acc = tl.zeros([HEADS, D], tl.float32)
    for s0 in tl.static_range(0, SPLITS, OWN):  # powers of 2
        s = s0 + tl.arange(0, OWN)[:, None]
        own = (n * SPLITS + s) * HQ + heads[None, :]
        top, total, acc = merge(top, total, acc, part_ptr, stat_ptr, own, (s < SPLITS) & real[None, :], D)
    first_place = (first_item * HKV + head) * BLOCK_M + place * GROUP
    for i0 in range(0, items, CHUNK):
        there = (i0 + i < items) & real[None, :]
        at = first_place + (i0 + i) * (HKV * BLOCK_M) + g[None, :]
        top, total, acc = merge(top, total, acc, prefix_part_ptr, prefix_stat_ptr, at, there, D)
    out_tile = out_ptr + (n * HQ + heads)[:, None].to(tl.int64) * D + d[None, :]
    tl.store(out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def merge(top, total, acc, part_ptr, stat_ptr, at, there, D: tl.constexpr):
    """Parts of one softmax, (maximum [G], normaliser [G], weighted sum [G, D]), and C more of it, outputs at
    part_ptr + at * D with the log2 of their normalisers at stat_ptr + at  # at: int[C, G]. Read around L1."""
    d = tl.arange(0, D)
    stats = tl.load(stat_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    tile = part_ptr + at[:, :, None] * D + d[None, None, :]
    parts = tl.load(tile, mask=there[:, :, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    higher = tl.maximum(top, tl.max(stats, 0))
    weight = tl.exp2(stats - higher[None, :])
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.sum(weight, 0), acc * fade[:, None] + tl.sum(parts * weight[:, :, None], 0)
