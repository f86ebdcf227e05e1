"""The decoder's layer operations on a CPU in float32, compiled by numba: each is one call for all threads.

A torch operation costs 4 to 10 us and hands work to sleeping threads, of which a step of a small model has hundreds.
Here a layer is five calls. Weights lie in panels of 16 outputs, [panels, inputs, 16]: one stream of memory for one row,
and the register tile of a matrix product for many. Every output is summed in the same order however many rows there
are, so a row's numbers depend neither on its batch mates nor on how its prompt was cut.

A job is cut into chunks. A 64-bit word, the ticket, holds its number and the chunks that nobody took yet; the thread
that takes one by compare-and-swap knows that the job's arguments stay until that chunk is done. The caller works too,
so a job ends even where the system lets no other thread run. Addresses are passed as integers.
"""

# numba's functions take no annotations: it finds the types by itself

from __future__ import annotations

from numba import carray

from sglite.runtime.device.cpu_kernels.arithmetic import normalise
from sglite.runtime.device.cpu_kernels.attention import append_chunk, attend_chunk
from sglite.runtime.device.cpu_kernels.compiling import compiled, inline
from sglite.runtime.device.cpu_kernels.layout import (
    APPEND,
    ARGS,
    ATTEND,
    DONE,
    GATED,
    HEADS,
    HELP,
    JOB,
    NUM_ARGS,
    PLAN_WORDS,
    PRODUCT,
    QUIT,
    SPAN,
    STATE_WORDS,
    TICKET,
    TOKENS,
    TOTAL,
)
from sglite.runtime.device.cpu_kernels.products import gated_chunk, product_chunk
from sglite.runtime.device.cpu_kernels.vectors import PANEL
from sglite.runtime.device.cpu_kernels.words import add, floats, load, longs, pause, store, swap_if, yield_core

_APPEND_SPAN = 4  # tokens
_PARTS = 16  # of attention for each thread
_SPINS = 4000  # looks at the ticket before a helper goes to sleep: some 0.1 ms
_YIELD_AFTER = 500  # looks, after which another process may have the core


@inline
def _chunk(state, chunk, scratch):
    args = carray(longs(state + 8 * ARGS), (NUM_ARGS,))
    job = args[JOB]
    if job == PRODUCT:
        product_chunk(args, chunk, scratch)
    elif job == GATED:
        gated_chunk(args, chunk, scratch)
    elif job == APPEND:
        append_chunk(args, chunk)
    else:
        attend_chunk(args, chunk, scratch)


@inline
def _work(state, scratch):
    """Take chunks until none is left; whether there was one."""
    ticket = state + 8 * TICKET
    worked = False
    while True:
        seen = load(ticket)
        left = seen & 0xFFFFFFFF
        if left == 0:
            return worked
        if swap_if(ticket, seen, seen - 1):
            total = carray(longs(state + 8 * ARGS), (NUM_ARGS,))[TOTAL]
            _chunk(state, total - left, scratch)
            add(state + 8 * DONE, 1)
            worked = True


@inline
def _publish(state, job, total, span):
    args = carray(longs(state + 8 * ARGS), (NUM_ARGS,))
    args[JOB], args[TOTAL], args[SPAN] = job, total, span
    store(state + 8 * DONE, 0)
    number = (load(state + 8 * TICKET) >> 32) + 1
    store(state + 8 * TICKET, ((number & 0x7FFFFFFF) << 32) | total)


@inline
def _wait_done(state):
    total = carray(longs(state + 8 * ARGS), (NUM_ARGS,))[TOTAL]
    looks = 0
    while load(state + 8 * DONE) < total:
        looks += 1
        if looks < _YIELD_AFTER:
            pause()
        else:
            yield_core()


@inline
def _normalise_rows(x, rows, inputs, norm, eps, target):
    weight = carray(floats(norm), (inputs,))
    for row in range(rows):
        source = carray(floats(x + row * inputs * 4), (inputs,))
        normalise(source, weight, eps, carray(floats(target + row * inputs * 4), (inputs,)))


@inline
def _begin(op, state, a, b, c, d, e, f, g, h, i, j, k, eps):
    """Publish the first job of an operation; see `call` for the meaning of the letters."""
    args = carray(longs(state + 8 * ARGS), (NUM_ARGS,))
    if op == ATTEND:
        args[3], args[4], args[5], args[6], args[7], args[8], args[9] = a, b, c, d, e, f, g
        tokens = carray(longs(d), (PLAN_WORDS,))[TOKENS]
        _publish(state, APPEND, (tokens + _APPEND_SPAN - 1) // _APPEND_SPAN, _APPEND_SPAN)
        return
    x = a
    if d != 0:
        _normalise_rows(a, b, c, d, eps, e)
        x = e
    args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10] = x, b, c, f, g, h, i, j
    panels = (g + PANEL - 1) // PANEL
    _publish(state, op, (panels + k - 1) // k, k)


@compiled(f"int64({', '.join(['int64'] * 15)}, float32)")
def call(op, state, helpers, scratch, a, b, c, d, e, f, g, h, i, j, k, eps):
    """One operation, or the life of a helper. One function, as each costs seconds to compile.

    PRODUCT  out = norm(x) @ weights + bias + residual, where what is 0 is left out
             a x  b rows  c inputs  d norm  e room for the normalised x  f weights  g outputs  h bias  i residual
             j out  [rows, outputs]  k panels a chunk
    GATED    out = silu(norm(x) @ gate) * (norm(x) @ up), gate's panels and then up's in the weights; g outputs of each
    ATTEND   everything between two projections, see AttentionBackend
             a qkv  b the layer's cache  c out  d plan  e, f weights of the norms of q and k
             g float32 numbers: eps of both norms, scale
    HELP     work until nothing came for a while; a the helper's number. On return its word in the state is 1, or
             QUIT is set

    Returns how many helpers sleep.
    """
    if op != HELP:
        _begin(op, state, a, b, c, d, e, f, g, h, i, j, k, eps)
    looks = 0
    while True:
        worked = _work(state, scratch)
        if op == HELP:
            if worked:
                looks = 0
            elif load(state + 8 * QUIT):
                return 0
            looks += 1
            if looks > _SPINS:
                store(state + 8 * (STATE_WORDS + 8 * a), 1)
                return 0
            if looks < _YIELD_AFTER:
                pause()
            else:
                yield_core()
        else:
            _wait_done(state)
            args = carray(longs(state + 8 * ARGS), (NUM_ARGS,))
            if args[JOB] != APPEND:
                break
            plan = carray(longs(d), (PLAN_WORDS,))
            pairs = plan[TOKENS] * plan[HEADS]
            span = max(1, pairs // (_PARTS * (helpers + 1)))
            _publish(state, ATTEND, (pairs + span - 1) // span, span)
    sleeping = 0
    for helper in range(helpers):
        sleeping += load(state + 8 * (STATE_WORDS + 8 * helper))
    return sleeping
