"""Attention of small steps with several new tokens a row: neighbours of one row read its keys and values together.

    tokens of the step   | a  a  a  a  a | b | c  c |      rows of the page table
    programs             | ^        ^    | ^ | ^    |      every TOKENS-th token of a row, for itself and those after it

New keys and values are in their slots already (`norm_rope_append_kernel`). The queries of a program are its tokens
times the query heads of one KV head, each masked to the keys up to its own position. Which tokens lead is found on the
device, so that a captured graph serves every division of its tokens into rows. As in decode_attention_kernel the keys
are cut into parts, which are merged by the last one to arrive.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglite.runtime.device.cuda.kernels.attention import norm_rope, rope_factors, tile_offsets
from sglite.runtime.device.cuda.kernels.tree_attention import merge


@triton.jit
def attend_causal(q, k, v, live, top, total, acc):
    """One step of online softmax, in powers of 2; a query may have no live key at all  # live: bool[M, T]."""
    s = tl.dot(q, tl.trans(k))
    s = tl.where(live, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    return higher, total * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def chunk_attention_kernel(  # noqa: PLR0915 - one launch cannot be split
    qkv_ptr,  # [N, (HQ + 2 * HKV) * D]
    q_norm_ptr,  # [D] with QK_NORM
    cos_sin_ptr,  # float32[max_len, D]
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[N]: tokens of a row are neighbours
    positions_ptr,  # int32[N]; negative: padding, which comes last
    out_ptr,  # [N, HQ * D]
    part_ptr,  # float32[N, HQ, SPLITS, D]
    stat_ptr,  # float32[N, HQ, SPLITS]: log2 of the normaliser
    count_ptr,  # int32[N, HKV], all 0 between launches
    table_stride,
    eps,
    score_scale,  # log2(e) * the softmax scale
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    TOKENS: tl.constexpr,  # of one row, at most, that a program takes
    BLOCK_M: tl.constexpr,  # TOKENS * GROUP, rounded up
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that are merged at a time
    LOOK: tl.constexpr,  # N, rounded up
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, SPLITS, HKV)."""
    HQ: tl.constexpr = HKV * GROUP
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    tokens = tl.num_programs(0)
    position = tl.load(positions_ptr + n)
    row = tl.load(rows_ptr + n)
    look = tl.arange(0, LOOK)
    earlier = tl.load(rows_ptr + look, mask=look < n, other=-1)
    leads = tl.sum((earlier == row).to(tl.int32), 0) % TOKENS == 0
    m = tl.arange(0, BLOCK_M)
    i = m // GROUP
    near = (i < TOKENS) & (n + i < tokens)
    same = tl.load(rows_ptr + n + i, mask=near, other=-1) == row
    mine = near & same & (tl.load(positions_ptr + n + i, mask=near, other=-1) == position + i)
    end = position + 1 + tl.max(tl.where(mine, i, 0), 0)
    chunk = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_T) * BLOCK_T
    parts = tl.cdiv(end, tl.maximum(chunk, 1))
    if (position < 0) | (leads == 0) | (split >= parts):
        if PDL:
            gdc_wait()
        return
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK_T)
    swap = (d + D // 2) % D
    dtype = k_ptr.dtype.element_ty
    table = table_ptr + row.to(tl.int64) * table_stride
    first = split * chunk
    last = tl.minimum(first + chunk, end)
    cos, sin = rope_factors(cos_sin_ptr, position + tl.where(mine, i, 0), D)
    gain = tl.zeros([D], tl.float32)
    gain_twin = gain
    if QK_NORM:
        gain = tl.load(q_norm_ptr + d).to(tl.float32)
        gain_twin = tl.load(q_norm_ptr + swap).to(tl.float32)
    if PDL:
        gdc_wait()
    q_tile = qkv_ptr + (n + i)[:, None] * ((HQ + 2 * HKV) * D) + (head * GROUP + m % GROUP)[:, None] * D
    q = tl.load(q_tile + d[None, :], mask=mine[:, None], other=0.0).to(tl.float32)
    twin = tl.load(q_tile + swap[None, :], mask=mine[:, None], other=0.0).to(tl.float32)
    q = (norm_rope(q, twin, gain, gain_twin, cos, sin, eps, D, QK_NORM) * score_scale).to(dtype)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for t0 in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        there = t0 + t < last
        at = tile_offsets(table, t0 + t, there, head, HKV, D, PAGE_SIZE)
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        live = there[None, :] & (t0 + t[None, :] <= (position + i)[:, None])
        top, total, acc = attend_causal(q, k, v, live, top, total, acc)

    heads = (n + i) * HQ + head * GROUP + m % GROUP
    out_tile = out_ptr + heads[:, None].to(tl.int64) * D + d[None, :]
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    if SPLITS == 1 or parts == 1:
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None])
        return
    place = heads.to(tl.int64) * SPLITS
    tl.store(part_ptr + (place + split)[:, None] * D + d[None, :], acc, mask=mine[:, None])
    tl.store(stat_ptr + place + split, top + tl.log2(total), mask=mine)
    tl.debug_barrier()  # the counter tells of what all threads have stored
    arrived = tl.atomic_add(count_ptr + n * HKV + head, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.debug_barrier()
        tl.store(count_ptr + n * HKV + head, 0)
        top = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite, for queries that are padding
        total = tl.where(mine, 0.0, 1.0)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for s0 in range(0, parts, CHUNK):
            s = s0 + tl.arange(0, CHUNK)[:, None]
            there = (s < parts) & mine[None, :]
            top, total, acc = merge(top, total, acc, part_ptr, stat_ptr, place[None, :] + s, there, D)
        tl.store(out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None])
