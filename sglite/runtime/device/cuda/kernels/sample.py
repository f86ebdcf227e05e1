"""A draw from the logits in one pass: bias, penalties, mask, temperature, Gumbel-max; ties go to the lowest id.

The twin of `executor/logits/draw.py` without top-k, top-p and min-p (those come as logits of the filtered
distribution). A program looks at one part of the vocabulary of one draw; the last one of a draw to arrive at its
counter takes the best of the parts, and writes what the next step reads. The noise is that of
`executor/logits/noise.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(3.4028234663852886e38)
_SEEN_IN_PROMPT = tl.constexpr(1 << 24)
_OK = tl.constexpr(0)
_NAN = tl.constexpr(1)
_EMPTY_MASK = tl.constexpr(2)


@triton.jit
def gumbel_noise(token, key0, key1):
    x = token.to(tl.uint32) ^ key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    x += key1
    x ^= x >> 15
    x *= 0x2C1B3C6D
    x ^= x >> 12
    x *= 0x297A2D39
    x ^= x >> 15
    w = tl.minimum(((x >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.960464477539063e-08)
    return -tl.log(-log1p(-w))


@triton.jit
def log1p(x):
    """log(1 + x) without loss where x is small: the error of 1 + x, as x / ((1 + x) - 1), is divided out again."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def best_of(values, tokens):
    """The largest value and the lowest token that has it."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, tokens, 0x7FFFFFFF), 0)


@triton.jit
def draw_kernel(  # noqa: C901, PLR0912, PLR0915 - one launch cannot be split
    logits_ptr,  # [L, logits_stride]
    logits_index_ptr,  # int32[S]
    mask_index_ptr,  # int32[S] or -1
    keys_ptr,  # int32[S, 2]
    temperature_ptr,  # float32[S]
    masks_ptr,  # int32[rows, words]
    counts_ptr,  # int32[slots, V] with PENALIZED
    count_slots_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    bias_ptr,  # float32[slots, V] with BIASED
    bias_slots_ptr,
    draft_ids_ptr,  # int32[S] with DRAFTS; -1 at each row's last draw
    draw_rows_ptr,  # int32[S] row of last_tokens
    value_ptr,  # float32[S, SPLITS, 2]: best value, largest logit before the mask
    token_ptr,  # int32[S, SPLITS, 2]: best token, whether the mask allows any (1) or a logit is NaN (2)
    arrived_ptr,  # int32[S], all 0 between launches
    tokens_ptr,  # int32[S]
    status_ptr,  # int32[S]
    accepted_ptr,  # int32[S] without DRAFTS, where a draw is a row: 1
    last_tokens_ptr,  # int32[max_rows] without DRAFTS
    scores_ptr,  # float32[S, V] with SCORES: the scores that a draw is made from go here, and nothing is drawn
    V,
    logits_stride,
    mask_stride,
    table_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    RANDOM: tl.constexpr,
    PENALIZED: tl.constexpr,
    BIASED: tl.constexpr,
    DRAFTS: tl.constexpr,
    SCORES: tl.constexpr,
):
    s = tl.program_id(0)
    split = tl.program_id(1)
    logits = logits_ptr + tl.load(logits_index_ptr + s).to(tl.int64) * logits_stride
    temperature = 0.0
    inverse = 1.0
    if RANDOM:
        temperature = tl.load(temperature_ptr + s)
        if temperature > 0:
            inverse = 1.0 / temperature
    key0 = tl.load(keys_ptr + s * 2).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + s * 2 + 1).to(tl.uint32, bitcast=True)
    mask_row = -1
    if MASKED:
        mask_row = tl.load(mask_index_ptr + s)
    count_slot = -1
    bias_slot = -1
    presence = 0.0
    frequency = 0.0
    repetition = 1.0
    if PENALIZED:
        count_slot = tl.load(count_slots_ptr + s)
        presence = tl.load(presence_ptr + s)
        frequency = tl.load(frequency_ptr + s)
        repetition = tl.load(repetition_ptr + s)
    if BIASED:
        bias_slot = tl.load(bias_slots_ptr + s)

    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    nan = tl.zeros([BLOCK], tl.int32)
    any_allowed = tl.zeros([BLOCK], tl.int32)
    part = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    for t0 in range(split * part, tl.minimum((split + 1) * part, V), BLOCK):
        t = t0 + lane
        live = t < V
        x = tl.load(logits + t, mask=live, other=float("-inf")).to(tl.float32)
        if BIASED:  # noqa: SIM102 - the outer one is decided at compile time
            if bias_slot >= 0:
                x += tl.load(bias_ptr + bias_slot.to(tl.int64) * table_stride + t, mask=live, other=0.0)
        if PENALIZED:  # noqa: SIM102
            if count_slot >= 0:
                count = tl.load(counts_ptr + count_slot.to(tl.int64) * table_stride + t, mask=live, other=0)
                if DRAFTS:  # those before this draw count as if they were accepted
                    before = s - 1
                    while before >= 0:
                        draft = tl.load(draft_ids_ptr + before)
                        count += (t == draft).to(tl.int32)
                        before = tl.where(draft >= 0, before - 1, -1)
                x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
                outputs = count & (_SEEN_IN_PROMPT - 1)
                x = x - frequency * outputs.to(tl.float32) - tl.where(outputs > 0, presence, 0.0)
        nan |= (x != x).to(tl.int32)
        largest = tl.maximum(largest, x)
        allowed = live
        if MASKED:
            if mask_row >= 0:
                word = tl.load(masks_ptr + mask_row.to(tl.int64) * mask_stride + t // 32, mask=live, other=0)
                allowed = live & (((word >> (t % 32)) & 1) != 0)
                x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
                any_allowed |= allowed.to(tl.int32)
            else:
                any_allowed |= live.to(tl.int32)
        if RANDOM:  # noqa: SIM102
            if temperature > 0:
                x = x * inverse
                if not SCORES:
                    x += gumbel_noise(t, key0, key1)
        x = tl.where(allowed, x, float("-inf"))
        if SCORES:
            tl.store(scores_ptr + s.to(tl.int64) * V + t, x, mask=live)
        higher = allowed & ((x > best) | (chosen == 0x7FFFFFFF))
        best = tl.where(higher, x, best)
        chosen = tl.where(higher, t, chosen)
    value, token = best_of(best, chosen)
    flags = tl.max(any_allowed, 0) + 2 * tl.max(nan, 0)
    most = tl.max(largest, 0)
    at = (s * SPLITS + split) * 2
    if SPLITS > 1:
        tl.store(value_ptr + at, value)
        tl.store(value_ptr + at + 1, most)
        tl.store(token_ptr + at, token)
        tl.store(token_ptr + at + 1, flags)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + s, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrived_ptr + s, 0)
        parts = (s * SPLITS + tl.arange(0, SPLITS)) * 2
        values = tl.load(value_ptr + parts, cache_modifier=".cg")
        most = tl.max(tl.load(value_ptr + parts + 1, cache_modifier=".cg"), 0)
        tokens = tl.load(token_ptr + parts, cache_modifier=".cg")
        marks = tl.load(token_ptr + parts + 1, cache_modifier=".cg")
        flags = tl.max(marks & 1, 0) + (tl.max(marks, 0) & 2)
        value, token = best_of(values, tokens)
    token = tl.where(token == 0x7FFFFFFF, 0, token)
    status = _OK
    if MASKED:
        status = tl.where((flags & 1) == 0, _EMPTY_MASK, _OK)
    status = tl.where((flags >= 2) | (most == float("-inf")), _NAN, status)
    tl.store(tokens_ptr + s, token)
    tl.store(status_ptr + s, status)
    if not DRAFTS and not SCORES:
        tl.store(accepted_ptr + s, 1)
        tl.store(last_tokens_ptr + tl.load(draw_rows_ptr + s), token)


@triton.jit
def verify_kernel(
    tokens_ptr,  # int32[S]
    draft_ids_ptr,  # int32[S]
    rows_ptr,  # int32[R]
    first_draw_ptr,  # int32[R]
    num_draws_ptr,  # int32[R]
    count_slots_ptr,  # int32[S] with PENALIZED
    counts_ptr,  # int32[slots, V] with PENALIZED
    accepted_ptr,  # int32[R]
    last_tokens_ptr,  # int32[max_rows]
    table_stride,
    PENALIZED: tl.constexpr,
):
    """One program a row: a draft is accepted while it equals the draw at its place. Then the draw behind the last
    accepted draft is the row's last token, and what was accepted is counted."""
    r = tl.program_id(0)
    first = tl.load(first_draw_ptr + r)
    last = first + tl.load(num_draws_ptr + r) - 1
    at = first
    while at < last:
        agrees = tl.load(tokens_ptr + at) == tl.load(draft_ids_ptr + at)
        last = tl.where(agrees, last, at)
        at += agrees.to(tl.int32)
    tl.store(accepted_ptr + r, at - first + 1)
    tl.store(last_tokens_ptr + tl.load(rows_ptr + r), tl.load(tokens_ptr + at))
    if PENALIZED:
        slot = tl.load(count_slots_ptr + first).to(tl.int64)
        if slot >= 0:
            for i in range(first, at + 1):
                tl.atomic_add(counts_ptr + slot * table_stride + tl.load(tokens_ptr + i), 1)
