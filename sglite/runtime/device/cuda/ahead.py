"""Steps whose graphs are captured before somebody waits for them: a few rows with several new tokens each, as forced
text brings them. A step of nothing but padding stands for each size: every kernel skips it."""

from __future__ import annotations

import numpy as np

from sglite.runtime.batch import Batch
from sglite.runtime.device.cuda.attention import choose_splits
from sglite.runtime.device.cuda.inputs import GraphKey

_SIZES = (2, 4, 8, 16, 32, 64, 128)  # new tokens; the coarse ones of inputs.py
_LENGTHS = (256, 1024, 4096)  # of the longest row


def keys_ahead(kv_heads: int) -> list[GraphKey]:
    """The graphs of such steps, those of short rows first."""
    keys = (
        GraphKey(size, size, decode=False, splits=choose_splits(size, kv_heads, longest))
        for longest in _LENGTHS
        for size in _SIZES
    )
    return list(dict.fromkeys(keys))


def padding(tokens: int) -> Batch:
    """A batch of so many tokens, of which only the sizes matter."""
    one = np.zeros(1, np.int32)
    return Batch(
        step=0,
        rows=one,
        starts=one,
        num_new=np.full(1, tokens, np.int32),
        token_ids=np.zeros(tokens, np.int32),
        num_logits=one + 1,
        samples=np.ones(1, np.bool_),
        num_drafts=one,
        output_index=one,
        mask_slots=one - 1,
        logprob_rows=np.empty(0, np.int32),
    )
