"""One step of the engine as plain numbers: what the scheduler decides and the executor carries out.

A step says only how many new tokens each row gets. Chunked prefill, decode, forced tokens, drafts, scoring
and prompt logprobs are one thing. With N rows in the batch and T = sum(num_new) tokens:

    row r:  positions  0 ........ start[r] ........ start[r] + num_new[r]
                       | KV in the cache | new tokens of this step |
                                                 | num_logits[r] last ones need logits |

Within a layer the KV of all new tokens is written before any row attends, so a row's page table may name
pages that another row of the same batch is filling: siblings share a common part in the very step that computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglite.grammar.matcher import Bitmask

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
SharedPrefixes = tuple[tuple[int, tuple[int, ...]], ...]  # (leading tokens shared, batch indices) of each group

DEVICE_TOKEN = -1  # in token_ids: the token that the sampler last wrote for this row, read on the device
NO_MASK = -1  # in mask_slots: this logits position is unconstrained


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A row's sampling parameters with every default resolved. Loaded into the device tables once, at admission."""

    temperature: float  # 0.0: greedy
    top_p: float  # 1.0: off
    top_k: int  # 0: off
    min_p: float  # 0.0: off
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float  # 1.0: off
    logit_bias: tuple[tuple[int, float], ...]
    seed: int  # uint64; the draw for the k-th output token depends on (seed, k) alone
    logprobs: int  # -1: off; k >= 0: the chosen token's and the k best

    @property
    def needs_counts(self) -> bool:
        """Penalties: the executor keeps token counts for this row."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


GREEDY = RowSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias=(),
    seed=0,
    logprobs=-1,
)  # the likeliest token, by the model's logits alone


@dataclass(frozen=True, slots=True)
class RowLoad:
    """A row index gets a new tenant with this step: executor tables for the row are reset to this."""

    row: int
    sampling: RowSampling
    prompt_ids: IntArray | None  # for repetition penalty: counted once (None: not needed)
    output_ids: IntArray | None  # of a row that was retracted and comes back: counted once


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """page_table[rows[u], columns[u]] = pages[u] for each u, before the step's forward: one scatter for all rows.

    A column is position // page_size. No (row, column) twice. A step of 256 decoding rows at page size 1 has 256
    of them, hence three arrays and not a list of objects.
    """

    rows: IntArray  # [U] row index (not batch index)
    columns: IntArray  # [U]
    pages: IntArray  # [U]

    def __len__(self) -> int:
        return int(self.rows.shape[0])


def _no_updates() -> PageUpdates:
    empty = np.empty(0, np.int32)
    return PageUpdates(empty, empty, empty)


@dataclass(frozen=True, slots=True)
class Batch:
    step: int  # grows by one with each batch
    rows: IntArray  # [N] row index of each row in the batch; no row twice
    starts: IntArray  # [N] tokens of the row whose KV is in the cache before this step
    num_new: IntArray  # [N] >= 1
    token_ids: IntArray  # [T] row after row; DEVICE_TOKEN only as the first new token of a row
    num_logits: IntArray  # [N] 0 (a prefill chunk that is not the last) .. num_new
    samples: BoolArray  # [N] draw one token at the last position (needs num_logits >= 1)
    num_drafts: IntArray  # [N] the last d of the new tokens are drafts to verify (num_logits = d + 1 then)
    output_index: IntArray  # [N] k in (seed, k): which output token the row's first draw is (drafts: k, k + 1, ...)
    mask_slots: IntArray  # [sum(num_logits)] row of the bitmask buffer for each logits position, or NO_MASK; from
    # mask_rows on: a place of the executor's memory of masks. Settled between forward() and sample().
    logprob_rows: IntArray  # indices into the batch of rows that want logprobs at their logits positions
    target_ids: dict[int, IntArray] = field(default_factory=dict)
    # batch index -> [K] token ids whose logprobs are wanted (scoring, prompt logprobs); such a row does not sample
    target_positions: dict[int, IntArray] = field(default_factory=dict)
    # batch index -> [K] which of the row's logits positions (0 .. num_logits - 1) each target id is for, ascending;
    # absent: target j is for position j. Several ids at one position: the branches of a scored trie
    loads: tuple[RowLoad, ...] = ()
    page_updates: PageUpdates = field(default_factory=_no_updates)
    kept_masks: list[tuple[int, int]] = field(default_factory=list)
    # (row of the bitmask buffer, place of the memory that is to hold this mask from these draws on), before sample()
    shared_prefixes: SharedPrefixes = ()
    # disjoint groups that share the pages of their first tokens, at most as many as each row's start; a hint for tree
    # attention, made only for an executor whose `shares_prefix_reads` is True

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(slots=True)
class StepResult:
    """What came back to the host for one batch. Index i is the batch's row i.

    `num_accepted[i]`: tokens decided in this step for a sampling row (1 without drafts; with drafts the accepted
    ones plus the drawn one; 0 for rows that do not sample). `tokens[i, :num_accepted[i]]`: their ids.
    `errors`: rows whose sampling failed (NaN logits, empty mask); the others are valid.
    """

    num_accepted: IntArray  # [N]
    tokens: IntArray  # [N, max drafts + 1]
    chosen_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # batch index -> [accepted] of the drawn token(s) of a row in logprob_rows, or [K] of target_ids;
    # from the unmasked, untempered distribution
    masked_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # same, after the mask
    top_logprobs: dict[int, tuple[IntArray, NDArray[np.float32]]] = field(default_factory=dict)
    # batch index of a row in logprob_rows whose RowSampling.logprobs is k > 0 -> (ids, logprobs), best first:
    # [accepted, k] of a row that samples, [num_logits, k] of one with target_ids
    errors: dict[int, str] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that is queued on the device."""

    def wait(self) -> StepResult:
        """Block for this step's copy to the host only. May be called once or more; same result."""
        ...


class Executor(Protocol):
    """Carries batches out. Calls come from one thread, in order; forward and sample alternate.

    State it owns: KV tensors [num_pages * page_size slots], page table [max_rows, max pages per row], last token
    and token counts per row. It never decides anything.
    """

    num_pages: int
    page_size: int
    max_rows: int
    vocab_size: int
    mask_rows: int  # rows of one bitmask buffer
    overlaps: bool  # the device works while the host goes on (False on the CPU)
    # May also have `shares_prefix_reads: bool` (absent: False): it makes use of Batch.shared_prefixes. And
    # `kept_mask_rows: int` (absent: 0): places of its memory of masks. And
    # `step_seconds(num_rows, num_tokens) -> float | None` (absent: 0): how long the device takes for a step with one
    # draw a row, as measured; 0: not measured yet; None: it would be slow, as the device has not prepared for it,
    # which it does where it is asked again and again. And `caught_up() -> bool` (absent: not known): the device has
    # nothing left to do of what was queued.

    def forward(self, batch: Batch) -> None:
        """Queue loads, page updates, input preparation and the model up to the logits.

        An exception here, in sample() or in wait() ends the requests of that step; the next call is a forward()."""
        ...

    def mask_buffer(self) -> Bitmask:
        """The host buffer int32[mask_rows, words] for the step whose forward was queued last; free to write
        until sample()."""
        ...

    def sample(self, batch: Batch) -> PendingStep:
        """Queue mask copy (only rows that the batch names), processors, mask, draw, write-back of last tokens
        on the device, and the copy to the host."""
        ...

    def rest(self) -> bool:
        """Nothing is asked for just now: time for a little of what later requests would wait for, some 10 ms. True:
        there is more of it; then it is called again soon."""
        ...

    def close(self) -> None: ...
