"""Rotation, the KV cache and attention."""

# numba's functions take no annotations: it finds the types by itself

from __future__ import annotations

import numpy as np
from numba import carray

from sglite.runtime.device.cpu_kernels.arithmetic import exp, normalise
from sglite.runtime.device.cpu_kernels.compiling import inline
from sglite.runtime.device.cpu_kernels.layout import (
    ANGLES,
    DIM,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    PLAN_WORDS,
    POSITIONS,
    ROWS,
    SLOTS,
    TABLE,
    TABLE_WIDTH,
    TILE_BYTES,
    TOKENS,
)
from sglite.runtime.device.cpu_kernels.vectors import LANES, dots, weighted
from sglite.runtime.device.cpu_kernels.words import floats, ints, longs


@inline
def append_chunk(args, chunk):
    """Of a span of tokens: normalise the heads, rotate queries in place, write keys and values to their slots."""
    span, qkv, cache, q_norm, k_norm = args[2], args[3], args[4], args[7], args[8]
    plan = carray(longs(args[6]), (PLAN_WORDS,))
    tokens, heads, kv_heads, dim = plan[TOKENS], plan[HEADS], plan[KV_HEADS], plan[DIM]
    positions = carray(ints(plan[POSITIONS]), (tokens,))
    slots = carray(ints(plan[SLOTS]), (tokens,))
    numbers = carray(floats(args[9]), (3,))
    half, width = dim // 2, heads + 2 * kv_heads
    for token in range(chunk * span, min((chunk + 1) * span, tokens)):
        row = carray(floats(qkv + token * width * dim * 4), (width, dim))
        angles = carray(floats(plan[ANGLES] + positions[token] * dim * 4), (dim,))
        slot = carray(floats(cache + slots[token] * 2 * kv_heads * dim * 4), (2 * kv_heads, dim))
        for head in range(heads + kv_heads):
            is_key = head >= heads
            if q_norm != 0:
                weight = carray(floats(k_norm if is_key else q_norm), (dim,))
                normalise(row[head], weight, numbers[1 if is_key else 0], row[head])
            target = slot[head - heads] if is_key else row[head]
            for i in range(half):
                a, b = row[head, i], row[head, half + i]
                target[i] = a * angles[i] - b * angles[half + i]
                target[half + i] = b * angles[i] + a * angles[half + i]
        for head in range(kv_heads):
            for i in range(dim):
                slot[kv_heads + head, i] = row[heads + kv_heads + head, i]


@inline
def attend_chunk(args, chunk, scratch):
    """A span of pairs of a query head and a token, one head's tokens after the other: they read the same keys."""
    span, plan = args[2], carray(longs(args[6]), (PLAN_WORDS,))
    tokens = plan[TOKENS]
    for pair in range(chunk * span, min((chunk + 1) * span, tokens * plan[HEADS])):
        _attend(args, plan, pair % tokens, pair // tokens, scratch)


@inline
def _attend(args, plan, token, head, scratch):
    """One query over all its keys: scores, softmax, weighted values."""
    qkv, cache = args[3], args[4]
    tokens, heads, kv_heads, dim = plan[TOKENS], plan[HEADS], plan[KV_HEADS], plan[DIM]
    count = carray(ints(plan[POSITIONS]), (tokens,))[token] + 1
    row = carray(ints(plan[ROWS]), (tokens,))[token]
    page_size = plan[PAGE_SIZE]
    table = carray(ints(plan[TABLE] + row * plan[TABLE_WIDTH] * 4), (plan[TABLE_WIDTH],))
    query_address = qkv + (token * (heads + 2 * kv_heads) + head) * dim * 4
    out_address = args[5] + (token * heads + head) * dim * 4
    query, out = carray(floats(query_address), (dim,)), carray(floats(out_address), (dim,))
    slot_bytes = 2 * kv_heads * dim * 4
    keys = cache + (head // (heads // kv_heads)) * dim * 4
    values = keys + kv_heads * dim * 4
    score_address = scratch + TILE_BYTES
    scores = carray(floats(score_address), (count + 3,))
    scale = carray(floats(args[9]), (3,))[2]
    vectors = dim - dim % LANES
    highest = np.float32(-np.inf)
    for p in range(0, count, 4):  # keys behind the last one are read as that one again
        s0 = _slot(table, p, page_size) * slot_bytes
        s1 = _slot(table, min(p + 1, count - 1), page_size) * slot_bytes
        s2 = _slot(table, min(p + 2, count - 1), page_size) * slot_bytes
        s3 = _slot(table, min(p + 3, count - 1), page_size) * slot_bytes
        dots(query_address, keys + s0, keys + s1, keys + s2, keys + s3, dim, score_address + 4 * p)
        if vectors < dim:
            for j, offset in enumerate((s0, s1, s2, s3)):
                key = carray(floats(keys + offset), (dim,))
                for i in range(vectors, dim):
                    scores[p + j] += query[i] * key[i]
    for p in range(count):
        highest = max(highest, scores[p])
    total = np.float32(0.0)
    for p in range(count):
        e = exp((scores[p] - highest) * scale)
        scores[p] = e
        total += e
    for p in range(count, count + 3):
        scores[p] = np.float32(0.0)
    for i in range(dim):
        out[i] = np.float32(0.0)
    for p in range(0, count, 4):
        s0 = _slot(table, p, page_size) * slot_bytes
        s1 = _slot(table, min(p + 1, count - 1), page_size) * slot_bytes
        s2 = _slot(table, min(p + 2, count - 1), page_size) * slot_bytes
        s3 = _slot(table, min(p + 3, count - 1), page_size) * slot_bytes
        weighted(out_address, score_address + 4 * p, values + s0, values + s1, values + s2, values + s3, dim)
        if vectors < dim:
            for j, offset in enumerate((s0, s1, s2, s3)):
                value = carray(floats(values + offset), (dim,))
                for i in range(vectors, dim):
                    out[i] += scores[p + j] * value[i]
    for i in range(dim):
        out[i] /= total


@inline
def _slot(table, position, page_size):
    if page_size == 1:
        return np.int64(table[position])
    return np.int64(table[position // page_size]) * page_size + position % page_size
