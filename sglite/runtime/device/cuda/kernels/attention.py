"""Decode attention: one new token a row, the paged KV split over programs, everything read on the device.

A program takes one row, one KV head and one part of the row's cached tokens [0, start):

    part s:   s * chunk ....... (s + 1) * chunk       chunk = start / SPLITS, rounded up to BLOCK_T
    owner:    the last part in use also holds the new token, from registers: it normalises and rotates the new key,
              writes key and value into their slot, and counts them in

so that norm, rope, append and attention are one launch. A row never reads back what this launch writes. With
APPEND=False keys and values are in place already (`norm_rope_append_kernel`), and a "row" may be any new token of a
row: that carries out small steps with several new tokens in some rows, and steps in which rows read what others fill.
With SPLITS > 1 the parts leave (sum, maximum, normaliser) in a workspace, and the last one to arrive at the row's
counter merges them and sets the counter back to 0. Lengths come from `starts` on the device: a captured graph serves
every length, only unused parts return at once. Rows are the fastest axis of the grid, so rows that share pages read
them at about the same time and meet in L2.

What does not depend on the kernel before (lengths, page table, rope factors and, with SPLITS > 1, the first tile of
cached keys and values) is loaded ahead of the wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rope_factors(cos_sin_ptr, position, D: tl.constexpr):
    """position: int32[B] -> cos, signed sin, each float32[B, D]: rotated = x * cos + (halves of x swapped) * sin."""
    d = tl.arange(0, D)
    angle = cos_sin_ptr + position[:, None].to(tl.int64) * D + (d % (D // 2))[None, :]
    sign = tl.where(d < D // 2, -1.0, 1.0)[None, :]
    return tl.load(angle), sign * tl.load(angle + D // 2)


@triton.jit
def norm_rope(x, twin, gain, gain_twin, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """x: float32[B, D], twin: its halves swapped. RMS norm over D, then the rotation."""
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * gain[None, :]
        twin = twin * scale * gain_twin[None, :]
    return x * cos + twin * sin


@triton.jit
def tile_offsets(table, token, live, head, HKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where the keys (or values) of `token`  # int[B]  lie in the cache."""
    page = tl.load(table + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    return ((page * PAGE_SIZE + token % PAGE_SIZE) * HKV + head) * D


@triton.jit
def attend_tile(q, k, v, live, top, total, acc):
    """One step of online softmax, in powers of 2."""
    s = tl.dot(q, tl.trans(k))
    s = tl.where(live[None, :], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def decode_attention_kernel(  # noqa: C901, PLR0915 - one launch cannot be split
    qkv_ptr,  # [N, (HQ + 2 * HKV) * D]
    q_norm_ptr,  # [D] with QK_NORM
    k_norm_ptr,
    cos_sin_ptr,  # float32[max_len, D]
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[N]
    starts_ptr,  # int32[N]; negative: padding
    slots_ptr,  # int32[N]
    out_ptr,  # [N, HQ * D]
    part_ptr,  # float32[N, HQ, SPLITS, D]
    stat_ptr,  # float32[N, HQ, SPLITS, 2]: maximum, normaliser
    count_ptr,  # int32[N, HKV], all 0 between launches
    table_stride,
    eps,
    score_scale,  # log2(e) * the softmax scale
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    BLOCK_G: tl.constexpr,  # GROUP rounded up to at least 16
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    QK_NORM: tl.constexpr,
    APPEND: tl.constexpr,
    PDL: tl.constexpr,
):
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
    swap = (d + D // 2) % D
    dtype = k_ptr.dtype.element_ty

    start = tl.load(starts_ptr + n)
    chunk = tl.cdiv(tl.cdiv(start, SPLITS), BLOCK_T) * BLOCK_T
    parts = 1
    first = 0
    last = start
    if SPLITS > 1:
        parts = tl.maximum(tl.cdiv(start, tl.maximum(chunk, 1)), 1)
        first = split * chunk
        last = tl.minimum(first + chunk, start)
    idle = (start < 0) | (split >= parts)
    if idle:
        if PDL:
            gdc_wait()
        return
    table = table_ptr + tl.load(rows_ptr + n).to(tl.int64) * table_stride
    cos, sin = rope_factors(cos_sin_ptr, start + tl.zeros([1], tl.int32), D)
    q_gain = tl.zeros([D], tl.float32)
    q_gain_twin = q_gain
    if QK_NORM:
        q_gain = tl.load(q_norm_ptr + d).to(tl.float32)
        q_gain_twin = tl.load(q_norm_ptr + swap).to(tl.float32)
    at = tile_offsets(table, first + t, first + t < last, head, HKV, D, PAGE_SIZE)
    k0 = tl.zeros([BLOCK_T, D], dtype)
    v0 = k0
    if SPLITS > 1 and APPEND:  # else the kernel before may just be writing them
        k0 = tl.load(k_ptr + at[:, None] + d[None, :], mask=(first + t < last)[:, None], other=0.0)
        v0 = tl.load(v_ptr + at[:, None] + d[None, :], mask=(first + t < last)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    if SPLITS > 1 and not APPEND:
        k0 = tl.load(k_ptr + at[:, None] + d[None, :], mask=(first + t < last)[:, None], other=0.0)
        v0 = tl.load(v_ptr + at[:, None] + d[None, :], mask=(first + t < last)[:, None], other=0.0)

    # The queries of this KV head.
    row = qkv_ptr + n * (HQ + 2 * HKV) * D
    q_tile = row + (head * GROUP + g)[:, None] * D
    q = tl.load(q_tile + d[None, :], mask=real, other=0.0).to(tl.float32)
    q_twin = tl.load(q_tile + swap[None, :], mask=real, other=0.0).to(tl.float32)
    q = norm_rope(q, q_twin, q_gain, q_gain_twin, cos, sin, eps, D, QK_NORM)
    q = (q * score_scale).to(dtype)

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    if split == parts - 1:
        new_k = row + (HQ + head) * D + tl.zeros([1], tl.int32)[:, None]
        k = tl.load(new_k + d[None, :]).to(tl.float32)
        k_twin = tl.load(new_k + swap[None, :]).to(tl.float32)
        k_gain = tl.zeros([D], tl.float32)
        k_gain_twin = k_gain
        if QK_NORM:
            k_gain = tl.load(k_norm_ptr + d).to(tl.float32)
            k_gain_twin = tl.load(k_norm_ptr + swap).to(tl.float32)
        k = norm_rope(k, k_twin, k_gain, k_gain_twin, cos, sin, eps, D, QK_NORM).to(dtype)
        v = tl.load(new_k + HKV * D + d[None, :])
        here = (tl.load(slots_ptr + n).to(tl.int64) * HKV + head) * D + d[None, :]
        if APPEND:
            tl.store(k_ptr + here, k)
            tl.store(v_ptr + here, v)
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        total += 1.0
        acc += v.to(tl.float32)

    if SPLITS > 1:
        if first < last:
            top, total, acc = attend_tile(q, k0, v0, first + t < last, top, total, acc)
        first += BLOCK_T
    for t0 in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        live = t0 + t < last
        at = tile_offsets(table, t0 + t, live, head, HKV, D, PAGE_SIZE)
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        top, total, acc = attend_tile(q, k, v, live, top, total, acc)

    if SPLITS == 1 or parts == 1:
        out_tile = out_ptr + (n * HQ + head * GROUP + g)[:, None] * D + d[None, :]
        tl.store(out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)
        return
    heads = n * HQ + head * GROUP + g
    tl.store(part_ptr + (heads * SPLITS + split)[:, None] * D + d[None, :], acc, mask=real)
    tl.store(stat_ptr + (heads * SPLITS + split) * 2, top, mask=g < GROUP)
    tl.store(stat_ptr + (heads * SPLITS + split) * 2 + 1, total, mask=g < GROUP)
    tl.debug_barrier()  # the counter tells of what all threads have stored
    arrived = tl.atomic_add(count_ptr + n * HKV + head, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.debug_barrier()
        tl.store(count_ptr + n * HKV + head, 0)
        merge_parts(part_ptr, stat_ptr, out_ptr, n * HQ + head * GROUP, parts, GROUP, D, SPLITS)


@triton.jit
def merge_parts(
    part_ptr, stat_ptr, out_ptr, first_head, parts, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    """Softmax-weighted sum of the parts of each head. Reads around L1: other multiprocessors wrote them."""
    d = tl.arange(0, D)
    s = tl.arange(0, SPLITS)
    there = s < parts
    for i in tl.static_range(GROUP):
        at = (first_head + i) * SPLITS + s
        tops = tl.load(stat_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(tops - tl.max(tops, 0))
        tile = part_ptr + at[:, None] * D + d[None, :]
        part = tl.load(tile, mask=there[:, None], other=0.0, cache_modifier=".cg")
        merged = tl.sum(part * weight[:, None], 0) / tl.sum(totals * weight, 0)
        tl.store(out_ptr + (first_head + i) * D + d, merged.to(out_ptr.dtype.element_ty))


@triton.jit
def norm_rope_append_kernel(
    qkv_ptr,  # [T, (HQ + 2 * HKV) * D]
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,  # int32[T]
    slots_ptr,  # int32[T]; negative: padding
    q_out_ptr,  # [T, HQ, D] with QUERIES
    k_out_ptr,  # [T, HKV, D] with KEYS
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    T,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    QK_NORM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotated keys and the values of all new tokens into their slots, rotated queries into q_out, keys into k_out.

    Grid (heads, token blocks); heads are those of q, k and v, without QUERIES those of k and v.
    """
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    if not QUERIES:
        head += HQ
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, D)
    swap = (d + D // 2) % D
    live = (t < T)[:, None]
    if PDL:
        gdc_wait()
    tile = qkv_ptr + t[:, None].to(tl.int64) * ((HQ + 2 * HKV) * D) + head * D
    x = tl.load(tile + d[None, :], mask=live, other=0.0)
    slot = tl.load(slots_ptr + t, mask=t < T, other=-1).to(tl.int64)
    kept = (slot >= 0)[:, None]
    if head >= HQ + HKV:
        tl.store(v_ptr + slot[:, None] * (HKV * D) + (head - HQ - HKV) * D + d[None, :], x, mask=kept)
        return
    twin = tl.load(tile + swap[None, :], mask=live, other=0.0).to(tl.float32)
    position = tl.maximum(tl.load(positions_ptr + t, mask=t < T, other=0), 0)
    cos, sin = rope_factors(cos_sin_ptr, position, D)
    gain_ptr = q_norm_ptr
    if head >= HQ:
        gain_ptr = k_norm_ptr
    gain = tl.zeros([D], tl.float32)
    gain_twin = gain
    if QK_NORM:
        gain = tl.load(gain_ptr + d).to(tl.float32)
        gain_twin = tl.load(gain_ptr + swap).to(tl.float32)
    x = norm_rope(x.to(tl.float32), twin, gain, gain_twin, cos, sin, eps, D, QK_NORM)
    if head < HQ:
        q_tile = q_out_ptr + t[:, None].to(tl.int64) * (HQ * D) + head * D + d[None, :]
        tl.store(q_tile, x.to(q_out_ptr.dtype.element_ty), mask=live)
    else:
        k_tile = k_ptr + slot[:, None] * (HKV * D) + (head - HQ) * D + d[None, :]
        tl.store(k_tile, x.to(k_ptr.dtype.element_ty), mask=kept)
        if KEYS:
            k_out = k_out_ptr + t[:, None].to(tl.int64) * (HKV * D) + (head - HQ) * D + d[None, :]
            tl.store(k_out, x.to(k_out_ptr.dtype.element_ty), mask=live)
