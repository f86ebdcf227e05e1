"""Decode attention for rows that share a prefix: the prefix is read once for all of them, each row's suffix by itself.

    position   0 ................. prefix ................. start
               | read by an item    | read by the row       | new token
               | for all its rows   | (suffix kernel)       |

The prefix kernel takes one item: one part of one prefix, for as many rows as fit a tile of queries, all query heads of
a KV head side by side, so that scores and outputs are tensor-core products. It leaves each query's output over that
part and the log2 of its normaliser. The suffix kernel is `decode_attention_kernel` from the row's prefix on; when its
part is done it merges the items' outputs in, weighted by their normalisers (log-sum-exp). A row without a prefix has no
items.

The prefix kernel lets its successor start only after its own wait: whatever came before it is complete then. So the
suffix kernel reads the new queries, keys and values (around L1, which may hold what stood there before) and its own
part of the cache beside the prefix kernel, and waits for it just before it merges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglite.runtime.device.cuda.kernels.attention import attend_tile, norm_rope, rope_factors, tile_offsets


@triton.jit
def prefix_attention_kernel(  # noqa: PLR0915 - one launch cannot be split
    qkv_ptr,  # [N, (HQ + 2 * HKV) * D]
    q_norm_ptr,  # [D] with QK_NORM
    cos_sin_ptr,  # float32[max_len, D]
    k_ptr,  # [slots, HKV, D]
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    starts_ptr,  # int32[N]
    members_ptr,  # int32: indices into the N rows, those of an item side by side
    items_ptr,  # int32[items, 8]: first member, members (0: nothing to do), row of the page table, begin, end
    part_ptr,  # [items, HKV, BLOCK_M, D]
    stat_ptr,  # float32[items, HKV, BLOCK_M]: log2 of the normaliser
    table_stride,
    eps,
    score_scale,  # log2(e) * the softmax scale
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head; an item has at most BLOCK_M // GROUP members
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (items, HKV)."""
    HQ: tl.constexpr = HKV * GROUP
    HALF: tl.constexpr = D // 2
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
    h = tl.arange(0, HALF)
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK_T)
    live = m // GROUP < count
    n = tl.load(members_ptr + first_member + m // GROUP, mask=live, other=0)
    position = tl.maximum(tl.load(starts_ptr + n, mask=live, other=0), 0)
    angle = cos_sin_ptr + position[:, None].to(tl.int64) * D + h[None, :]
    cos = tl.load(angle)
    sin = tl.load(angle + HALF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    # Queries in halves, which the rotation combines: less in registers than two whole tiles.
    tile = qkv_ptr + n[:, None].to(tl.int64) * ((HQ + 2 * HKV) * D) + (head * GROUP + m % GROUP)[:, None] * D
    low = tl.load(tile + h[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    high = tl.load(tile + HALF + h[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        low = low * scale * tl.load(q_norm_ptr + h).to(tl.float32)[None, :]
        high = high * scale * tl.load(q_norm_ptr + HALF + h).to(tl.float32)[None, :]
    dtype = k_ptr.dtype.element_ty
    first = ((low * cos - high * sin) * score_scale).to(dtype)
    second = ((high * cos + low * sin) * score_scale).to(dtype)
    q = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK_M, D))

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
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(dtype), v, acc * fade[:, None])
        top = higher
    if whole < end:
        valid = whole + t < end
        at = tile_offsets(table, whole + t, valid, head, HKV, D, PAGE_SIZE)
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        top, total, acc = attend_tile(q, k, v, valid, top, total, acc)

    place = (item * HKV + head) * BLOCK_M + m
    tl.store(stat_ptr + place, top + tl.log2(total), mask=live)
    part = (acc / total[:, None]).to(part_ptr.dtype.element_ty)
    tl.store(part_ptr + place[:, None] * D + d[None, :], part, mask=live[:, None])


@triton.jit
def suffix_attention_kernel(  # noqa: C901, PLR0915 - one launch cannot be split
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
    shares_ptr,  # int32[N, 4]: tokens of the shared prefix, its first item, items, the row's place in each
    prefix_part_ptr,  # [items, HKV, BLOCK_M, D]
    prefix_stat_ptr,  # float32[items, HKV, BLOCK_M]
    part_ptr,  # float32[N, HQ, SPLITS, D]
    stat_ptr,  # float32[N, HQ, SPLITS, 2]: maximum, normaliser
    count_ptr,  # int32[N, HKV], all 0 between launches
    table_stride,
    eps,
    score_scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP rounded up to at least 16
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,  # of each row's suffix
    ITEMS: tl.constexpr,  # a row has at most that many
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    QK_NORM: tl.constexpr,
    APPEND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, SPLITS, HKV). The new token's key and value go into their slot with APPEND, else are there already."""
    HQ: tl.constexpr = HKV * GROUP
    if PDL:
        gdc_launch_dependents()
        if not APPEND:  # the kernel before the prefix kernel wrote keys and values that are read here
            gdc_wait()
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
    prefix = tl.load(shares_ptr + n * 4)
    chunk = tl.cdiv(tl.cdiv(start - prefix, SPLITS), BLOCK_T) * BLOCK_T
    parts = tl.maximum(tl.cdiv(start - prefix, tl.maximum(chunk, 1)), 1)
    begin = prefix + split * chunk
    end = tl.minimum(begin + chunk, start)
    idle = (start < 0) | (split >= parts)
    if idle:
        if PDL and APPEND:
            gdc_wait()
        return
    first_item = tl.load(shares_ptr + n * 4 + 1)
    items = tl.load(shares_ptr + n * 4 + 2)
    place = tl.load(shares_ptr + n * 4 + 3)
    table = table_ptr + tl.load(rows_ptr + n).to(tl.int64) * table_stride
    cos, sin = rope_factors(cos_sin_ptr, start + tl.zeros([1], tl.int32), D)
    q_gain = tl.zeros([D], tl.float32)
    q_gain_twin = q_gain
    if QK_NORM:
        q_gain = tl.load(q_norm_ptr + d).to(tl.float32)
        q_gain_twin = tl.load(q_norm_ptr + swap).to(tl.float32)

    row = qkv_ptr + n * (HQ + 2 * HKV) * D
    q_tile = row + (head * GROUP + g)[:, None] * D
    q = tl.load(q_tile + d[None, :], mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
    q_twin = tl.load(q_tile + swap[None, :], mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
    q = norm_rope(q, q_twin, q_gain, q_gain_twin, cos, sin, eps, D, QK_NORM)
    q = (q * score_scale).to(dtype)

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    if split == parts - 1:
        new_k = row + (HQ + head) * D + tl.zeros([1], tl.int32)[:, None]
        k = tl.load(new_k + d[None, :], cache_modifier=".cg").to(tl.float32)
        k_twin = tl.load(new_k + swap[None, :], cache_modifier=".cg").to(tl.float32)
        k_gain = tl.zeros([D], tl.float32)
        k_gain_twin = k_gain
        if QK_NORM:
            k_gain = tl.load(k_norm_ptr + d).to(tl.float32)
            k_gain_twin = tl.load(k_norm_ptr + swap).to(tl.float32)
        k = norm_rope(k, k_twin, k_gain, k_gain_twin, cos, sin, eps, D, QK_NORM).to(dtype)
        v = tl.load(new_k + HKV * D + d[None, :], cache_modifier=".cg")
        if APPEND:
            here = (tl.load(slots_ptr + n).to(tl.int64) * HKV + head) * D + d[None, :]
            tl.store(k_ptr + here, k)
            tl.store(v_ptr + here, v)
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        total += 1.0
        acc += v.to(tl.float32)

    for t0 in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        live = t0 + t < end
        at = tile_offsets(table, t0 + t, live, head, HKV, D, PAGE_SIZE)
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        top, total, acc = attend_tile(q, k, v, live, top, total, acc)

    if PDL and APPEND:
        gdc_wait()
    first_place = (first_item * HKV + head) * BLOCK_M + place * GROUP
    if SPLITS == 1 or parts == 1:
        for i in tl.static_range(GROUP):
            own_top = tl.sum(tl.where(g == i, top, 0.0), 0)
            own_total = tl.sum(tl.where(g == i, total, 0.0), 0)
            own = tl.sum(tl.where((g == i)[:, None], acc, 0.0), 0)
            merged = merge_prefix(
                prefix_part_ptr, prefix_stat_ptr, first_place + i, items, own_top, own_total, own, HKV * BLOCK_M, D,
                ITEMS,
            )  # fmt: skip
            tl.store(out_ptr + (n * HQ + head * GROUP + i) * D + d, merged.to(out_ptr.dtype.element_ty))
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
        s = tl.arange(0, SPLITS)
        there = s < parts
        for i in tl.static_range(GROUP):
            at = (n * HQ + head * GROUP + i) * SPLITS + s
            tops = tl.load(stat_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            tile = part_ptr + at[:, None] * D + d[None, :]
            each = tl.load(tile, mask=there[:, None], other=0.0, cache_modifier=".cg")
            own_top = tl.max(tops, 0)
            weight = tl.exp2(tops - own_top)
            own_total = tl.sum(totals * weight, 0)
            own = tl.sum(each * weight[:, None], 0)
            merged = merge_prefix(
                prefix_part_ptr, prefix_stat_ptr, first_place + i, items, own_top, own_total, own, HKV * BLOCK_M, D,
                ITEMS,
            )  # fmt: skip
            tl.store(out_ptr + (n * HQ + head * GROUP + i) * D + d, merged.to(out_ptr.dtype.element_ty))


@triton.jit
def merge_prefix(
    part_ptr,
    stat_ptr,
    first_place,
    items,
    own_top,
    own_total,
    own,  # float32[D], not divided by own_total
    ITEM_STRIDE: tl.constexpr,
    D: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """One head's output over its suffix and the items of its prefix -> float32[D]."""
    d = tl.arange(0, D)
    i = tl.arange(0, ITEMS)
    there = i < items
    at = first_place + i * ITEM_STRIDE
    stats = tl.load(stat_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    tile = part_ptr + at[:, None] * D + d[None, :]
    parts = tl.load(tile, mask=there[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    high = tl.maximum(own_top, tl.max(stats, 0))
    weight = tl.exp2(stats - high)
    fade = tl.exp2(own_top - high)
    return (tl.sum(parts * weight[:, None], 0) + own * fade) / (tl.sum(weight, 0) + own_total * fade)
