"""The simulated model: what is drawn is a hash of the whole text before it, found by a native thread.

    KV       a place holds the hash of all tokens up to it, so that text depends on what is read through the page table
    draws    a legal token that the hash picks: the first set bit from a place on that the hash names

One numba function runs for ever in a thread of its own, without the interpreter lock. It looks for jobs in shared
memory and sleeps some microseconds in between; the host only writes numbers there.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

SLOTS = 4  # jobs in memory at the same time; two are under way at most

# Words of a job's header.
N, L, S, R, K = range(5)  # rows, logits positions, draws, rows that draw, masks to be kept
_HEADER = 8

# Words of the doorbell.
POSTED, DONE, QUIT = 0, 8, 16  # each on a cache line of its own
_BELL = 24

_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@njit(cache=True, nogil=True)
def _mix(x):
    x = np.uint64(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _forward(slot, header, rows, before, num_new, num_logits, tokens, places, kv, last, context, said):
    at, out = 0, 0
    for i in range(header[slot, N]):
        state = np.uint64(0x9E3779B97F4A7C15)
        if before[slot, i] >= 0:
            state = kv[before[slot, i]]
        new = num_new[slot, i]
        first = new - num_logits[slot, i]
        for j in range(new):
            token = tokens[slot, at]
            if token < 0:
                token = last[rows[slot, i]]
            state = _mix(state + np.uint64(token) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
            kv[places[slot, at]] = state
            if j >= first:
                context[slot, out], said[slot, out] = state, token
                out += 1
            at += 1


@njit(cache=True, nogil=True)
def _legal(words, token):
    return (words[token >> 5] >> np.uint32(token & 31)) & np.uint32(1)


@njit(cache=True, nogil=True)
def _pick(words, vocab, noise):
    """A token whose bit is set, or -1."""
    count = (vocab + 31) // 32
    at = np.int64(noise % np.uint64(count))
    for _ in range(count):
        word = words[at]
        if at == count - 1 and vocab % 32:
            word &= np.uint32((1 << (vocab % 32)) - 1)
        if word:
            turn = np.int64((noise >> np.uint64(40)) % np.uint64(32))
            for k in range(32):
                bit = (turn + k) % 32
                if (word >> np.uint32(bit)) & np.uint32(1):
                    return at * 32 + bit
        at += 1
        if at == count:
            at = 0
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _draw(words, masked, vocab, draft, said, noise, agree, repeat, liked):
    """`agree`: of 2 ** 32, how often the draft or, where a mask is narrow, a token that somebody likes is taken.
    `repeat`: of 2 ** 16, how often the token before, `said`, is drawn again under a mask."""
    yes = (noise >> np.uint64(8)) & np.uint64(0xFFFFFFFF) < agree
    if draft >= 0 and yes and (not masked or _legal(words, draft)):
        return np.int64(draft)
    if not masked:
        return np.int64(1000 + noise % np.uint64(vocab - 2000)) if vocab > 4000 else np.int64(noise % np.uint64(vocab))
    if yes and words[0] != np.uint32(0xFFFFFFFF):
        for k in range(1, liked[0] + 1):
            if _legal(words, liked[k]):
                return np.int64(liked[k])
    if (noise >> np.uint64(48)) < repeat and _legal(words, said):
        return np.int64(said)
    return _pick(words, vocab, noise)


@njit(cache=True, nogil=True)
def _sample(slot, header, context, said, masks, turn_rows, own_rows, index, mask_index, drafts, keys, heat, rows, first,
            draws, kept, last, vocab, agree, repeat, liked, drawn, accepted, status):  # fmt: skip
    for k in range(header[slot, K]):
        masks[2 * own_rows + kept[slot, k, 1]] = masks[turn_rows + kept[slot, k, 0]]
    for s in range(header[slot, S]):
        noise = context[slot, index[slot, s]]
        if heat[slot, s] > 0:
            noise = _mix(noise ^ (np.uint64(np.uint32(keys[slot, s, 0])) << np.uint64(32)
                                  | np.uint64(np.uint32(keys[slot, s, 1]))))  # fmt: skip
        noise = _mix(noise + np.uint64(0xD1B54A32D192ED03))
        place = mask_index[slot, s]
        masked = place >= 0
        line = 0
        if masked:
            line = turn_rows + place if place < own_rows else place + own_rows
        token = _draw(masks[line], masked, vocab, drafts[slot, s], said[slot, index[slot, s]], noise, agree, repeat,
                      liked)  # fmt: skip
        status[slot, s] = 0 if token >= 0 else 2
        drawn[slot, s] = max(token, 0)
    for r in range(header[slot, R]):
        count = 1
        begin = first[slot, r]
        while count < draws[slot, r] and drawn[slot, begin + count - 1] == drafts[slot, begin + count - 1]:
            count += 1
        accepted[slot, r] = count
        last[rows[slot, r]] = drawn[slot, begin + count - 1]


@njit(cache=True, nogil=True)
def _serve(bell, header, job_rows, before, num_new, num_logits, tokens, places, index, mask_index, drafts, keys, heat,
           draw_rows, first, draws, kept, kv, last, context, said, masks, own_rows, vocab, agree, repeat, liked,
           drawn, accepted, status):  # fmt: skip
    done = np.int64(0)
    idle = np.int64(0)
    while bell[QUIT] == 0:
        if bell[POSTED] == done:
            idle += 1
            _usleep(np.uint32(5 if idle < 20000 else 300))
            continue
        idle = 0
        slot = done % SLOTS
        _forward(slot, header, job_rows, before, num_new, num_logits, tokens, places, kv, last, context, said)
        _sample(slot, header, context, said, masks, (done % 2) * own_rows, own_rows, index, mask_index, drafts, keys,
                heat, draw_rows, first, draws, kept, last, vocab, agree, repeat, liked, drawn, accepted,
                status)  # fmt: skip
        done += 1
        bell[DONE] = done


@njit(cache=True, nogil=True)
def hash_at(context, targets):
    """Numbers in [0, 1) for a context and a token each  # float32[K]"""
    found = np.empty(len(context), np.float32)
    for i in range(len(context)):
        found[i] = np.float32(_mix(context[i] + np.uint64(targets[i])) >> np.uint64(40)) / np.float32(1 << 24)
    return found


@dataclass(frozen=True)
class Sizes:
    rows: int  # of a batch
    tokens: int  # new tokens of a step
    draws: int
    places: int  # of KV
    mask_rows: int  # of one of the two mask buffers
    kept: int  # masks that are remembered
    vocab: int


class Jobs:
    """The memory that the host and the native thread share, and that thread.

    The two mask buffers come first in `masks`, then the ones that are kept. Job number n uses slot n % SLOTS and mask
    buffer n % 2; the host may fill those of job n when job n - 2 is done.
    """

    def __init__(self, sizes: Sizes, *, agree: float, repeat: float) -> None:
        def ints(*shape: int) -> NDArray[np.int32]:
            return np.zeros((SLOTS, *shape), np.int32)

        self.sizes = sizes
        self.header = np.zeros((SLOTS, _HEADER), np.int64)
        self.rows, self.num_new, self.num_logits = (ints(sizes.rows) for _ in range(3))
        self.before = ints(sizes.rows)  # place of the token before a row's first new one, or -1
        self.tokens, self.places = ints(sizes.tokens), ints(sizes.tokens)
        self.index, self.mask_index, self.drafts = (ints(sizes.draws) for _ in range(3))
        self.keys, self.heat = ints(sizes.draws, 2), np.zeros((SLOTS, sizes.draws), np.float32)
        self.draw_rows, self.first, self.draws = (ints(sizes.rows) for _ in range(3))
        self.kept = ints(sizes.mask_rows, 2)
        self.context, said = np.zeros((SLOTS, sizes.tokens), np.uint64), ints(sizes.tokens)
        self.drawn, self.accepted, self.status = ints(sizes.draws), ints(sizes.rows), ints(sizes.draws)
        self.masks = np.zeros((2 * sizes.mask_rows + sizes.kept, -(-sizes.vocab // 32)), np.int32)
        self.liked = np.zeros(4096, np.int32)  # how many, and which
        self.bell = np.zeros(_BELL, np.int64)
        kv, last = np.zeros(sizes.places, np.uint64), np.zeros(sizes.rows, np.int32)
        arguments = (
            self.bell, self.header, self.rows, self.before, self.num_new, self.num_logits, self.tokens, self.places,
            self.index, self.mask_index, self.drafts, self.keys, self.heat, self.draw_rows, self.first, self.draws,
            self.kept, kv, last, self.context, said, self.masks.view(np.uint32), sizes.mask_rows, sizes.vocab,
            np.uint64(int(agree * (1 << 32))), np.uint64(int(repeat * (1 << 16))), self.liked, self.drawn,
            self.accepted, self.status,
        )  # fmt: skip
        hash_at(np.zeros(1, np.uint64), np.zeros(1, np.int32))  # compiled by now
        threading.Thread(target=_run, args=arguments, name="simulated-device", daemon=True).start()
        weakref.finalize(self, _dismiss, self.bell)

    def like(self, token_id: int) -> None:
        count = int(self.liked[0])
        if count + 1 < len(self.liked) and token_id not in self.liked[1 : count + 1]:
            self.liked[count + 1] = token_id
            self.liked[0] = count + 1


def sleep_exactly() -> None:
    """This thread's sleeps of some microseconds are that short (Linux)."""
    ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK, ns


def _run(*arguments: object) -> None:
    sleep_exactly()
    _serve(*arguments)


def _dismiss(bell: NDArray[np.int64]) -> None:
    bell[QUIT] = 1
