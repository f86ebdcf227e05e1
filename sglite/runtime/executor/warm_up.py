"""A few steps before the first request, so that it does not wait for kernels to be loaded.

Kernels and libraries are loaded when they are first called, a second in all for a GPU, compiled ones from their cache.
The steps run a prompt and decode it, without and with a bitmask, in row 0 and page 0 on; whatever they leave in the
row's tables and in the cache's pages belongs to nobody and is written over.
"""

from __future__ import annotations

import numpy as np

from sglite.runtime.batch import DEVICE_TOKEN, GREEDY, NO_MASK, Batch, Executor, PageUpdates, RowLoad

_PROMPT = 64
_DECODES = (NO_MASK, NO_MASK, 0, 0)  # mask row of each decode step; a size is captured when it comes again


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
