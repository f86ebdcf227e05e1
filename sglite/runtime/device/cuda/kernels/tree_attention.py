"""Attention for rows that share a prefix: the prefix is read once for all of them, each row's suffix by itself.

    position   0 ................. prefix ................. start
               | read by an item    | read by the row       | new token, in place already
               | for all its rows   | (suffix kernel)               |

The prefix kernel takes one item: one part of one prefix, for as many rows as fit a tile of queries, all query heads of
a KV head side by side, so that scores and outputs are tensor-core products. It leaves each query's output over that
part and the log2 of its normaliser. The suffix kernel computes a row's attention over what follows its prefix, in parts
that meet like those of `decode_attention_kernel`, and merges the items' outputs in, weighted by their normalisers
(log-sum-exp). A row without a prefix has no items.

Before them `norm_rope_append_kernel` leaves rotated queries, and new keys and values in their slots. The prefix kernel
lets its successor start only after its own wait, when all that is complete. So the suffix kernel reads it (around L1,
which may hold what stood there before) beside the prefix kernel, and waits for that just before it merges.
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
def suffix_attention_kernel(  # noqa: PLR0915 - one launch cannot be split
    q_ptr,  # [N, HQ, D], rotated
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[N]
    positions_ptr,  # int32[N] of the new token; negative: padding
    out_ptr,  # [N, HQ * D]
    shares_ptr,  # int32[N, 4]: tokens of the shared prefix, its first item, items, the row's place in each
    prefix_part_ptr,  # [items, HKV, BLOCK_M, D]
    prefix_stat_ptr,  # float32[items, HKV, BLOCK_M]
    part_ptr,  # float32[N, HQ, SPLITS, D]
    stat_ptr,  # float32[N, HQ, SPLITS, 2]: maximum, normaliser
    count_ptr,  # int32[N, HKV], all 0 between launches
    table_stride,
    scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP rounded up to at least 16
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,  # of each row's suffix
    HEADS: tl.constexpr,  # GROUP rounded up to a power of 2
    CHUNK: tl.constexpr,  # parts that are merged at a time
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
    real = (g < GROUP)[:, None]

    tokens = tl.load(positions_ptr + n) + 1
    table = table_ptr + tl.load(rows_ptr + n).to(tl.int64) * table_stride
    prefix = tl.load(shares_ptr + n * 4)
    first_item = tl.load(shares_ptr + n * 4 + 1)
    items = tl.load(shares_ptr + n * 4 + 2)
    place = tl.load(shares_ptr + n * 4 + 3)
    first_head = n * HQ + head * GROUP
    q_tile = q_ptr + (first_head + g).to(tl.int64)[:, None] * D + d[None, :]
    q = tl.load(q_tile, mask=real, other=0.0, cache_modifier=".cg")
    chunk = tl.cdiv(tl.cdiv(tokens - prefix, SPLITS), BLOCK_T) * BLOCK_T
    parts = tl.cdiv(tokens - prefix, tl.maximum(chunk, 1))
    begin = prefix + split * chunk
    end = tl.minimum(begin + chunk, tokens)
    if split >= parts:  # padding has no part
        if PDL:
            gdc_wait()
        return

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

    if PDL:
        gdc_wait()
    gg = tl.arange(0, HEADS)
    if SPLITS == 1:
        top = first_rows(top, BLOCK_G, HEADS)
        total = first_rows(total, BLOCK_G, HEADS)
        tiles = tl.reshape(acc, (BLOCK_G // HEADS, HEADS, D))
        outer = tl.arange(0, BLOCK_G // HEADS)[:, None, None]
        acc = tl.sum(tl.where(outer == 0, tiles, 0.0), 0)
    else:
        own_parts = (first_head + g) * SPLITS + split
        tl.store(part_ptr + own_parts[:, None] * D + d[None, :], acc, mask=real)
        tl.store(stat_ptr + own_parts * 2, top, mask=g < GROUP)
        tl.store(stat_ptr + own_parts * 2 + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # the counter tells of what all threads have stored
        arrived = tl.atomic_add(count_ptr + n * HKV + head, 1, sem="acq_rel", scope="gpu")
        if arrived < parts - 1:
            return
        tl.debug_barrier()
        tl.store(count_ptr + n * HKV + head, 0)
        top = tl.full([HEADS], -1.0e30, tl.float32)  # finite, for heads that are padding
        total = tl.where(gg < GROUP, 0.0, 1.0)
        acc = tl.zeros([HEADS, D], tl.float32)
        for i0 in range(0, parts, CHUNK):
            i = (i0 + tl.arange(0, CHUNK))[:, None]
            there = (i < parts) & (gg < GROUP)[None, :]
            at = (first_head + gg)[None, :] * SPLITS + i
            tops = tl.load(stat_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            top, total, acc = merge(top, total, acc, tops, totals, part_ptr, at, there, D)

    first_place = (first_item * HKV + head) * BLOCK_M + place * GROUP
    for i0 in range(0, items, CHUNK):
        i = (i0 + tl.arange(0, CHUNK))[:, None]
        there = (i < items) & (gg < GROUP)[None, :]
        at = first_place + i * (HKV * BLOCK_M) + gg[None, :]
        tops = tl.load(prefix_stat_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        top, total, acc = merge(top, total, acc, tops, tl.where(there, 1.0, 0.0), prefix_part_ptr, at, there, D)
    out_tile = out_ptr + (first_head + gg)[:, None].to(tl.int64) * D + d[None, :]
    tl.store(out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(gg < GROUP)[:, None])


@triton.jit
def first_rows(x, ROWS: tl.constexpr, FIRST: tl.constexpr):
    """x[:FIRST]  # float32[ROWS]"""
    tiles = tl.reshape(x, (ROWS // FIRST, FIRST))
    return tl.sum(tl.where(tl.arange(0, ROWS // FIRST)[:, None] == 0, tiles, 0.0), 0)


@triton.jit
def merge(top, total, acc, tops, totals, part_ptr, at, there, D: tl.constexpr):
    """Parts of one softmax: (maximum [G], normaliser [G], weighted sum [G, D]) and C more of it, the sums of which lie
    at part_ptr + at * D. Reads around L1: other multiprocessors wrote them."""
    d = tl.arange(0, D)
    tile = part_ptr + at[:, :, None] * D + d[None, None, :]
    parts = tl.load(tile, mask=there[:, :, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    higher = tl.maximum(top, tl.max(tops, 0))
    weight = tl.exp2(tops - higher[None, :])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(totals * weight, 0)
    return higher, total, acc * fade[:, None] + tl.sum(parts * weight[:, :, None], 0)
