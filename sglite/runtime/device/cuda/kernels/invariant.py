"""Kernels whose result for a row does not depend on what else is in the step.

A product adds up its terms in the order of K, BLOCK_K at a time, in one float32 accumulator: no part of K is given to
another program, and the size of the tile around a row changes only who computes it. That BLOCK_K and the order are
functions of the weight's shape alone makes the bits the same for 1 row and for 8,192 (tests/gpu/test_deterministic.py
compares them; the tensor cores treat every element of a tile alike).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglite.runtime.device.cuda.kernels.linear import prefetch


@triton.jit
def product_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    y_ptr,  # [M, N]
    bias_ptr,  # [N or 2N] with BIAS
    M,
    N,
    K: tl.constexpr,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 64 or 128: rows of W are the tensor cores' long side
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each program's part of W that L2 is asked for before the wait
    LANES: tl.constexpr,  # threads of a program
    GATED: tl.constexpr,  # y = silu(x @ W[:N].T) * (x @ W[N:].T)
    ADD: tl.constexpr,  # y += x @ W.T, rounded once
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M / BLOCK_M, N / BLOCK_N), rounded up."""
    if PDL:
        gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = m < M
    w_tile = w_ptr + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    up_tile = w_tile + N.to(tl.int64) * K
    x_tile = x_ptr + tl.where(live, m, 0)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        if PREFETCH > 0:
            base = w_ptr + tl.program_id(1).to(tl.int64) * (BLOCK_N * K)
            prefetch(base, PREFETCH, LANES)
            if GATED:
                prefetch(base + N.to(tl.int64) * K, PREFETCH, LANES)
        gdc_wait()
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_tile + k0)
        x = tl.load(x_tile + k0)
        acc = tl.dot(w, x, acc)
        if GATED:
            acc_up = tl.dot(tl.load(up_tile + k0), x, acc_up)
    y = acc
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y_up = acc_up
        if BIAS:
            y_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = y / (1.0 + tl.exp(-y)) * y_up
    y_tile = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    inside = live[None, :] & (n < N)[:, None]
    if ADD:
        y += tl.load(y_tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_attention_kernel(
    q_ptr,  # [T, HKV * GROUP, D], rotated
    k_ptr,  # [slots, HKV, D], with the keys and values of the new tokens
    v_ptr,
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[tiles]: row of the page table
    starts_ptr,  # int32[tiles]: position of the tile's first token; negative: padding
    firsts_ptr,  # int32[tiles]: its place among the T tokens; unless SINGLE
    counts_ptr,  # int32[tiles]: tokens, at most TOKENS; unless SINGLE
    out_ptr,  # [T, HKV * GROUP, D]
    table_stride,
    score_scale,  # log2(e) * the softmax scale
    HKV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    BLOCK_G: tl.constexpr,  # GROUP rounded up to a power of 2
    TOKENS: tl.constexpr,  # TOKENS * BLOCK_G is at least 16
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,  # tile i is token i
    PDL: tl.constexpr,
):
    """Causal attention of up to TOKENS neighbouring tokens of one row, all query heads of one KV head.

    A query meets the keys from position 0 on, BLOCK_T at a time, in one program: tiles of keys behind its own position
    leave its sums as they are, so that neither the tile that a token falls into nor the length of its row's prompt
    that was computed before changes a bit. Grid (tiles, HKV).
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts_ptr + tile)
    if start < 0:
        if PDL:
            gdc_wait()
        return
    first = tile
    count = 1
    if not SINGLE:
        first = tl.load(firsts_ptr + tile)
        count = tl.load(counts_ptr + tile)
    table = table_ptr + tl.load(rows_ptr + tile).to(tl.int64) * table_stride
    m = tl.arange(0, TOKENS * BLOCK_G)
    token = m // BLOCK_G
    group = m % BLOCK_G
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK_T)
    inside = (token < count) & (group < GROUP)
    place = (first + token).to(tl.int64) * (HKV * GROUP) + head * GROUP + group
    at = place[:, None] * D + d[None, :]
    if PDL:
        gdc_wait()
    q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
    top = tl.full([TOKENS * BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * BLOCK_G], tl.float32)
    acc = tl.zeros([TOKENS * BLOCK_G, D], tl.float32)
    end = start + count
    for t0 in tl.range(0, end, BLOCK_T, num_stages=STAGES):
        key = t0 + t
        live = key < end
        page = tl.load(table + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        slot = ((page * PAGE_SIZE + key % PAGE_SIZE) * HKV + head) * D
        k = tl.load(k_ptr + slot[:, None] + d[None, :], mask=live[:, None], other=0.0)
        v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * score_scale
        s = tl.where(key[None, :] <= (start + token)[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
