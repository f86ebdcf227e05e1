"""A few steps before the first request, so that it does not wait for kernels to be loaded.

Kernels and libraries are loaded when they are first called, a second in all for a GPU, compiled ones from their cache.
The steps run a prompt and decode it, without and with a bitmask, in row 0 and page 0 on; whatever they leave in the
row's tables and in the cache's pages belongs to nobody and is written over.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from sglite.runtime.batch import (
    DEVICE_TOKEN,
    GREEDY,
    NO_MASK,
    Batch,
    Executor,
    PageUpdates,
    RowLoad,
    RowSampling,
)

_PROMPT = 64
_DECODES = (NO_MASK, NO_MASK, 0, 0)  # mask row of each decode step; a size is captured when it comes again

_ROWS = (1, 32)  # few draws are spread over more programs
_RANDOM = replace(GREEDY, temperature=1.0)
_FILTERED = replace(_RANDOM, top_p=0.5)
_SAMPLINGS = tuple(
    replace(sampling, **extras)
    for sampling in (GREEDY, _RANDOM, _FILTERED)
    for extras in ({}, {"presence_penalty": 0.5, "logit_bias": ((0, 1.0),)})
)


def warm_up(executor: Executor, *, max_model_len: int) -> None:
    """Nothing where a device computes on the host: it has nothing to load."""
    prompt = min(_PROMPT, max_model_len - len(_DECODES))
    if not executor.overlaps or prompt < 1 or executor.num_pages * executor.page_size < prompt + len(_DECODES):
        return
    _run(executor, _batch(executor.page_size, 0, np.zeros(prompt, np.int32), NO_MASK))
    for i, mask in enumerate(_DECODES):
        _run(executor, _batch(executor.page_size, prompt + i, np.full(1, DEVICE_TOKEN, np.int32), mask))


def _run(executor: Executor, batch: Batch) -> None:
    executor.forward(batch)
    executor.mask_buffer()[0] = -1  # every token
    executor.sample(batch).wait()


def kinds_of_draws(executor: Executor, *, max_model_len: int) -> list[Batch]:
    """A step for each kind of draw that requests may ask for: alone and of several rows, masked, random, filtered, with
    counts or biases, with drafts."""
    if not executor.overlaps or max_model_len < 2:
        return []
    rows = sorted({min(count, executor.max_rows, executor.num_pages) for count in _ROWS})
    kinds = itertools.product(rows, (NO_MASK, 0), _SAMPLINGS, (0, 1))
    return [_draws(n, mask, sampling, drafts) for n, mask, sampling, drafts in kinds]


def _draws(rows: int, mask: int, sampling: RowSampling, drafts: int) -> Batch:
    """The first step of so many rows, each with a page of its own, with that many drafts behind its first token."""
    every, columns = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    tokens = drafts + 1
    return Batch(
        step=0,
        rows=every,
        starts=columns,
        num_new=np.full(rows, tokens, np.int32),
        token_ids=np.zeros(rows * tokens, np.int32),
        num_logits=np.full(rows, tokens, np.int32),
        samples=np.ones(rows, np.bool_),
        num_drafts=np.full(rows, drafts, np.int32),
        output_index=columns,
        mask_slots=np.full(rows * tokens, mask, np.int32),
        logprob_rows=np.empty(0, np.int32),
        loads=tuple(RowLoad(row, sampling, None, None) for row in every.tolist()),
        page_updates=PageUpdates(every, columns, every),
    )


def _batch(page_size: int, start: int, tokens: np.ndarray, mask: int) -> Batch:
    """One step of row 0, whose pages are 0, 1, 2 and so on."""

    def one(value: int) -> np.ndarray:
        return np.full(1, value, np.int32)

    new = np.arange(-(-start // page_size), -(-(start + len(tokens)) // page_size), dtype=np.int32)
    return Batch(
        step=start,
        rows=one(0),
        starts=one(start),
        num_new=one(len(tokens)),
        token_ids=tokens,
        num_logits=one(1),
        samples=np.ones(1, np.bool_),
        num_drafts=one(0),
        output_index=one(0),
        mask_slots=one(mask),
        logprob_rows=np.empty(0, np.int32),
        loads=(RowLoad(0, GREEDY, None, None),) if start == 0 else (),
        page_updates=PageUpdates(np.zeros_like(new), new, new),
    )
