"""How long one H200 and its host take for a step, from what was measured on them.

The numbers come from benchmarks/gpu.md, benchmarks/gpu/*.json (commit c76b99f), benchmarks/forced_text.md and
benchmarks/tree_attention.md. A step of T new tokens of N rows:

    base(T) + kv_token * tokens that the rows read (a shared prefix once) + pair * (new token, cached token) pairs

`base` is what is left of the measured steps when their reads are taken off; between its points it is interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglite.runtime.batch import Batch

MAX_SMALL = 512  # tokens of a step that is a captured graph
_DECODE = (1, 2, 4, 8, 12, 16, 20, 24, 28, *range(32, 128, 8), *range(128, 256, 16), *range(256, MAX_SMALL + 1, 32))
_COARSE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, MAX_SMALL)


@dataclass(frozen=True)
class StepCosts:
    """Of one model's shape. Seconds, all of them."""

    name: str
    layers: int
    kv_bytes: int  # of one token
    base: tuple[tuple[int, float], ...]  # (new tokens, seconds); behind the last one `token` more for each
    token: float
    kv_token: float  # reading one cached token
    pair: float  # one new token of a large step attending to one cached token
    tree_row: float  # a layer of tree attention: for each row,
    tree_k_row: float  # for each row and 1,024 shared tokens,
    tree_k: float  # and for each 1,024 shared tokens
    sample: float  # draw, verify and copy: the end of every step, part of `base`
    eager: float  # host: the launches of a step that is no graph

    def device_s(self, batch: Batch) -> float:
        """Without the sampler."""
        ends = batch.starts + batch.num_new
        read = int(ends.sum(dtype=np.int64))
        tree = 0.0
        for length, rows in batch.shared_prefixes:
            read -= length * len(rows)
            k = length / 1024
            tree += self.layers * (10e-6 + self.tree_row * len(rows) + k * (self.tree_k + self.tree_k_row * len(rows)))
        seconds = self.base_s(batch.num_tokens) + self.kv_token * read + tree - self.sample
        if batch.num_tokens > MAX_SMALL:
            # a row's n new tokens attend to what was cached and, on average, to half of each other
            new = batch.num_new.astype(np.int64)
            seconds += self.pair * float((new * (batch.starts + new / 2)).sum())
        return max(seconds, 1e-6)

    def base_s(self, num_tokens: int) -> float:
        sizes, seconds = zip(*self.base, strict=True)
        if num_tokens > sizes[-1]:
            return seconds[-1] + self.token * (num_tokens - sizes[-1])
        return float(np.interp(num_tokens, sizes, seconds))

    # The host's part of the launches: of graph replays, input and plan copies, events; not the Python around them.

    def forward_host_s(self, num_rows: int) -> float:
        return 120e-6 + 0.7e-6 * num_rows

    def sample_host_s(self, num_rows: int) -> float:
        return 110e-6 + 0.4e-6 * num_rows


QWEN_06B = StepCosts(
    name="qwen3-0.6b",
    layers=28,
    kv_bytes=114_688,
    base=(
        (1, 0.675e-3), (2, 0.95e-3), (4, 1.05e-3), (8, 1.10e-3), (16, 1.12e-3), (32, 1.145e-3), (64, 1.2e-3),
        (128, 1.3e-3), (256, 1.6e-3), (384, 2.1e-3), (512, 2.4e-3),
    ),
    token=1.9e-6,
    kv_token=0.0287e-6,
    pair=3.8e-10,
    tree_row=0.11e-6,
    tree_k_row=0.0165e-6,
    tree_k=0.6e-6,
    sample=60e-6,
    eager=15e-3,
)  # fmt: skip

QWEN_8B = StepCosts(
    name="qwen3-8b",
    layers=36,
    kv_bytes=147_456,
    base=(
        (1, 4.0e-3), (2, 4.4e-3), (4, 4.5e-3), (8, 4.6e-3), (16, 4.68e-3), (32, 4.7e-3), (64, 5.0e-3),
        (128, 5.15e-3), (256, 7.3e-3), (384, 11e-3), (512, 13e-3),
    ),
    token=21e-6,
    kv_token=0.0369e-6,
    pair=9.8e-10,
    tree_row=0.125e-6,
    tree_k_row=0.034e-6,
    tree_k=0.7e-6,
    sample=60e-6,
    eager=20e-3,
)  # fmt: skip

CAPTURE_S = 15e-3  # host and device, for the graph of one size
FREE_BYTES = 118 << 30  # of the H200's memory, for KV

# What the host needed there for scheduling and for taking results in, a step of N free rows (free_N, 0.6B): what this
# machine takes for the same tells how much slower it is.
HOST_STEP_S = {1: (0.154e-3, 0.071e-3), 32: (0.177e-3, 0.092e-3)}


def costs_for(hidden_size: int) -> StepCosts:
    """Of the measured shapes the one that is nearer."""
    return QWEN_06B if hidden_size < 2500 else QWEN_8B


def padded(num_tokens: int, *, decode: bool) -> int:
    """The captured size for that many tokens."""
    return next(size for size in (_DECODE if decode else _COARSE) if size >= num_tokens)
