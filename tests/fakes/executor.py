"""An executor without a model: its KV cache holds token ids and positions, its logits are a hash of what it reads.

The logits of a position are a function of all tokens that are gathered *through the page table* up to it, so a
wrong page, a page that someone else has overwritten, a wrong position or a wrong sharing changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglite.grammar.matcher import Bitmask
from sglite.runtime.batch import DEVICE_TOKEN, NO_MASK, Batch, RowSampling, StepResult

_PRIME = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def scripted_logits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """What follows these tokens  # float32[vocab_size]; the reference that tests compare with."""
    ids = np.asarray(tokens, np.uint64)
    with np.errstate(over="ignore"):
        weights = (np.arange(1, len(ids) + 1, dtype=np.uint64) * _PRIME) | np.uint64(1)
        seed = (ids * weights + weights).sum(dtype=np.uint64) + np.uint64(len(ids))
        x = (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * _MIX ^ seed
        x = (x ^ (x >> np.uint64(30))) * _MIX
        x = (x ^ (x >> np.uint64(27))) * _PRIME
    return ((x >> np.uint64(40)).astype(np.float64) / (1 << 24) * 8.0).astype(np.float32)


def scripted_greedy(prompt: Sequence[int], n: int, vocab_size: int, *, banned: Sequence[int] = ()) -> list[int]:
    """The n tokens that greedy decoding gives after `prompt`."""
    tokens = list(prompt)
    for _ in range(n):
        logits = scripted_logits(tokens, vocab_size)
        logits[list(banned)] = -np.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


class ScriptedExecutor:
    """Implements sglite.runtime.batch.Executor.

    `overlaps` imitates a device that works while the host goes on: the result of a step is only there after wait().
    `fail_on`: phase -> step numbers in which it raises ("forward", "sample", "wait"). `bad_rows`: steps in which the
    row at batch index 0 gets a sampling error.
    """

    def __init__(
        self,
        *,
        num_pages: int = 4096,
        page_size: int = 1,
        max_rows: int = 32,
        vocab_size: int = 259,
        max_len: int = 4096,
        overlaps: bool = False,
        kept_mask_rows: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.mask_rows = 4 * max_rows
        self.kept_mask_rows = kept_mask_rows
        self.overlaps = overlaps
        self.shares_prefix_reads = False
        self.fail_on: dict[str, set[int]] = {"forward": set(), "sample": set(), "wait": set()}
        self.bad_rows: set[int] = set()
        self.batches: list[Batch] = []
        self.closed = False
        self.rests = 0
        self.force_token: dict[int, int] = {}  # step -> token that batch index 0 draws whatever its mask says
        self._kv = np.full((num_pages * page_size, 2), -1, np.int64)  # token id, position
        self._table = np.full((max_rows, -(-max_len // page_size)), -1, np.int64)
        self._last = np.zeros(max_rows, np.int64)
        self._sampling: dict[int, RowSampling] = {}
        self._mask = np.zeros((self.mask_rows, -(-vocab_size // 32)), np.int32)
        self._kept = np.zeros((kept_mask_rows, -(-vocab_size // 32)), np.int32)
        self._logits: list[np.ndarray] = []

    @property
    def computed_tokens(self) -> int:
        return sum(b.num_tokens for b in self.batches)

    def forward(self, batch: Batch) -> None:
        _check(batch)
        self.batches.append(batch)
        if batch.step in self.fail_on["forward"]:
            raise RuntimeError("scripted forward failure")
        for load in batch.loads:
            self._sampling[load.row] = load.sampling
        updates = batch.page_updates
        self._table[updates.rows, updates.columns] = updates.pages
        fails = any(batch.step in steps for steps in self.fail_on.values())  # then its KV is wrong
        at = 0
        for i, row in enumerate(batch.rows.tolist()):
            start, new = int(batch.starts[i]), int(batch.num_new[i])
            tokens = batch.token_ids[at : at + new].astype(np.int64)
            at += new
            if tokens[0] == DEVICE_TOKEN:
                tokens[0] = self._last[row]
            positions = np.arange(start, start + new)
            slots = self._table[row, positions // self.page_size] * self.page_size + positions % self.page_size
            assert (slots >= 0).all(), "a row writes to a page that it was not given"
            self._kv[slots, 0], self._kv[slots, 1] = tokens, -1 if fails else positions
        shared = {i: (length, indices[0]) for length, indices in batch.shared_prefixes for i in indices}
        self._logits = []
        for i, row in enumerate(batch.rows.tolist()):  # after all rows have written: they may read each other's
            length, first = shared.get(i, (0, i))
            end = int(batch.starts[i] + batch.num_new[i])
            for position in range(end - int(batch.num_logits[i]), end):
                self._logits.append(self._read(row, position, length, int(batch.rows[first])))

    def _read(self, row: int, position: int, shared: int, first: int) -> np.ndarray:
        """The first `shared` tokens through the pages of row `first`, as tree attention does for a group of rows."""
        positions = np.arange(position + 1)
        rows = np.where(positions < shared, first, row)
        slots = self._table[rows, positions // self.page_size] * self.page_size + positions % self.page_size
        read = self._kv[slots]
        if not (read[:, 1] == positions).all():
            read = read * 7 + 1  # KV of a wrong position: a different context
        return scripted_logits(read[:, 0].astype(np.uint64), self.vocab_size)

    def mask_buffer(self) -> Bitmask:
        return self._mask

    def sample(self, batch: Batch) -> ScriptedPending:
        if batch.step in self.fail_on["sample"]:
            raise RuntimeError("scripted sample failure")
        for slot, place in batch.kept_masks:
            self._kept[place] = self._mask[slot]
        width = 1 + int(batch.num_drafts.max())
        result = StepResult(batch.samples.astype(np.int32), np.full((len(batch.rows), width), -1, np.int32))
        at = 0
        token_ends = np.cumsum(batch.num_new)
        wanted = set(batch.logprob_rows.tolist())
        for i, row in enumerate(batch.rows.tolist()):
            logits = self._logits[at : at + int(batch.num_logits[i])]
            slots = batch.mask_slots[at : at + int(batch.num_logits[i])]
            at += int(batch.num_logits[i])
            if i in batch.target_ids:
                self._score(batch, i, row, logits, result, wanted=i in wanted)
            if not batch.samples[i]:
                continue
            drafts = batch.token_ids[token_ends[i] - int(batch.num_drafts[i]) : token_ends[i]].tolist()
            self._verify(batch, i, logits, slots, drafts, result)
            if i == 0 and batch.step in self.bad_rows:
                result.errors[i] = "scripted NaN"
            if i == 0 and batch.step in self.force_token:
                result.tokens[i, 0] = self.force_token[batch.step]
            self._last[row] = result.tokens[i, result.num_accepted[i] - 1]
            if i in wanted:
                self._report(i, row, logits[-1 - len(drafts) :], result)
        return ScriptedPending(result, fails=batch.step in self.fail_on["wait"])

    def _verify(
        self,
        batch: Batch,
        i: int,
        logits: list[np.ndarray],
        slots: np.ndarray,
        drafts: list[int],
        result: StepResult,
    ) -> None:
        """Draw at the row's last 1 + drafts positions, as long as what is drawn is what was drafted."""
        row, first = int(batch.rows[i]), len(logits) - 1 - len(drafts)
        for j in range(1 + len(drafts)):
            token = self._draw(logits[first + j], int(slots[first + j]), row, int(batch.output_index[i]) + j)
            if token is None:
                result.errors[i] = "empty mask"
            result.tokens[i, j] = token or 0
            result.num_accepted[i] = j + 1
            if j == len(drafts) or token != drafts[j]:
                return

    def _draw(self, logits: np.ndarray, slot: int, row: int, k: int) -> int | None:
        sampling = self._sampling[row]
        logits = logits.copy()
        for token_id, bias in sampling.logit_bias:
            logits[token_id] += bias
        if slot != NO_MASK:
            mask = self._mask[slot] if slot < self.mask_rows else self._kept[slot - self.mask_rows]
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
            if not bits.any():
                return None
            logits[bits == 0] = -np.inf
        if sampling.temperature > 0:
            noise = scripted_logits([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32, k], self.vocab_size)
            uniform = np.clip(noise.astype(np.float64) / 8.0, 1e-9, 1 - 1e-9)
            logits = logits / sampling.temperature - np.log(-np.log(uniform))
        return int(logits.argmax())

    def _report(self, i: int, row: int, logits: list[np.ndarray], result: StepResult) -> None:
        count = int(result.num_accepted[i])
        logprobs = np.stack([_log_softmax(one) for one in logits[:count]])
        result.chosen_logprobs[i] = logprobs[np.arange(count), result.tokens[i, :count]]
        k = self._sampling[row].logprobs
        if k > 0:
            best = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
            result.top_logprobs[i] = best.astype(np.int32), np.take_along_axis(logprobs, best, axis=1)

    def _score(
        self, batch: Batch, i: int, row: int, logits: list[np.ndarray], result: StepResult, *, wanted: bool
    ) -> None:
        logprobs = np.stack([_log_softmax(one) for one in logits])
        ids = batch.target_ids[i]
        positions = batch.target_positions.get(i, np.arange(len(ids)))
        result.chosen_logprobs[i] = logprobs[positions, ids]
        k = self._sampling[row].logprobs
        if wanted and k > 0:
            best = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
            result.top_logprobs[i] = best.astype(np.int32), np.take_along_axis(logprobs, best, axis=1)

    def rest(self) -> bool:
        self.rests += 1
        return False

    def close(self) -> None:
        self.closed = True


class ScriptedPending:
    def __init__(self, result: StepResult, *, fails: bool) -> None:
        self._result = result
        self._fails = fails

    def wait(self) -> StepResult:
        if self._fails:
            raise RuntimeError("scripted wait failure")
        return self._result


class NullExecutor(ScriptedExecutor):
    """Computes nothing and always draws token 7: for measuring the host side."""

    def forward(self, batch: Batch) -> None:
        """Nothing."""

    def sample(self, batch: Batch) -> ScriptedPending:
        n = len(batch.rows)
        return ScriptedPending(StepResult(batch.samples.astype(np.int32), np.full((n, 1), 7, np.int32)), fails=False)


def _check(batch: Batch) -> None:
    """The promises of the contract that every batch must keep."""
    n = len(batch.rows)
    for name in ("starts", "num_new", "num_logits", "samples", "num_drafts", "output_index"):
        assert len(getattr(batch, name)) == n, name
    for name in ("rows", "starts", "num_new", "token_ids", "num_logits", "num_drafts", "output_index", "mask_slots"):
        assert getattr(batch, name).dtype == np.int32, name
    assert len(set(batch.rows.tolist())) == n
    assert (batch.num_new >= 1).all()
    assert int(batch.num_new.sum()) == batch.num_tokens
    assert (batch.num_logits <= batch.num_new).all()
    assert (batch.num_logits[batch.samples] >= 1).all()
    assert (batch.num_logits[batch.samples] >= 1 + batch.num_drafts[batch.samples]).all()
    assert not batch.num_drafts[~batch.samples].any()
    assert len(batch.mask_slots) == int(batch.num_logits.sum())
    offsets = np.cumsum(batch.num_new) - batch.num_new
    device = np.flatnonzero(batch.token_ids == DEVICE_TOKEN)
    assert set(device.tolist()) <= set(offsets.tolist()), "DEVICE_TOKEN only as a row's first new token"
    grouped = [i for _, indices in batch.shared_prefixes for i in indices]
    assert len(grouped) == len(set(grouped))
    assert all(batch.starts[i] >= length for length, indices in batch.shared_prefixes for i in indices)
    updates = batch.page_updates
    assert len(updates.rows) == len(updates.columns) == len(updates.pages)
    assert len(set(zip(updates.rows.tolist(), updates.columns.tolist(), strict=True))) == len(updates)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
