"""The executor: what a GPU's does on the host, with a device behind it that only takes time.

Launches return after the time that they take on the H200's host; the results are there after what the device takes for
the steps queued so far. A step that is no graph, or the first of its size, costs what it costs there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from benchmarks.simulated import model
from benchmarks.simulated.times import CAPTURE_S, MAX_SMALL, StepCosts, padded
from sglite.grammar.matcher import Bitmask
from sglite.runtime.batch import Batch, StepResult
from sglite.runtime.device.base import SamplePlan
from sglite.runtime.device.cuda.wanted import Wanted
from sglite.runtime.device.inputs import host_inputs
from sglite.runtime.executor.row_tables import SamplingTables
from sglite.runtime.executor.sampler import DrawnRows, DrawPlanner
from sglite.runtime.executor.scoring import StepScores

_KEPT_MASK_BYTES = 128 << 20
_BURST = 10e-6  # a launch holds the interpreter lock for so long, then lets go of it for as long
_SLEEP = 80e-6  # what is left of a wait when the host no longer sleeps: sleeping takes longer than asked


@njit(cache=True, nogil=True)
def _spin(rounds):
    """Some nanoseconds a round, without the interpreter lock."""
    x = np.uint64(rounds)
    for _ in range(rounds):
        x = x * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        x ^= x >> np.uint64(29)
    return x


class SimulatedExecutor:
    """Implements sglite.runtime.batch.Executor.

    `slower`: how many times slower this machine's cores are than the H200's host; device and launches take so many
    times as long, so that ratios of times are what they are there.
    `agree`: how often a legal draft is what is drawn (a trained model's odds; 0 is a model of random weights).
    `repeat`: how often a constrained row says the same token again where it may, as greedy text of random weights
    does: numbers become long and strings come to their bounds.
    `idles`: launches and waits take no CPU time, so that a thread's CPU time is that of the engine alone.

    Not simulated: penalties and logit biases change nothing, masked logprobs are those without a mask.

    `device_s`, `idle_s`: seconds that the device worked, and stood still between two steps because the host was late.
    `late_s`: seconds that the simulation itself held results up; a run that has many of them says nothing.
    """

    page_size: int
    overlaps = True

    def __init__(
        self,
        costs: StepCosts,
        *,
        vocab_size: int,
        max_rows: int,
        max_model_len: int,
        num_pages: int,
        page_size: int = 1,
        max_step_tokens: int = 8192,
        slower: float = 1.0,
        agree: float = 0.0,
        repeat: float = 0.0,
        shares_prefix_reads: bool = True,
        idles: bool = False,
    ) -> None:
        self.num_pages, self.page_size, self.max_rows, self.vocab_size = num_pages, page_size, max_rows, vocab_size
        self.mask_rows = 4 * max_rows
        self.kept_mask_rows = _KEPT_MASK_BYTES // (4 * -(-vocab_size // 32))
        self.shares_prefix_reads = shares_prefix_reads
        self.device_s = self.idle_s = self.late_s = 0.0
        self._costs, self._slower, self.idles = costs, slower, idles
        self._table = np.zeros((max_rows, -(-max_model_len // page_size)), np.int32)
        self._sampling = SamplingTables(max_rows, vocab_size, torch.device("cpu"))
        self._planner = DrawPlanner(self._sampling)
        most = max(max_step_tokens, max_rows) + 5 * max_rows
        self.jobs = model.Jobs(
            model.Sizes(
                rows=max_rows,
                tokens=most,
                draws=5 * max_rows,
                places=num_pages * page_size,
                mask_rows=self.mask_rows,
                kept=self.kept_mask_rows,
                vocab=vocab_size,
            ),
            agree=agree,
            repeat=repeat,
        )
        self._posted = 0
        self._free_at = 0.0  # when the device has done what is queued
        self._graphs: set[tuple[int, bool]] = set()
        self._wanted: Wanted[tuple[int, bool]] = Wanted(time.perf_counter)
        self._rounds = _calibrated()
        model.sleep_exactly()  # the thread that builds an engine is the one that runs it

    # -- Executor

    def forward(self, batch: Batch) -> None:
        began = time.perf_counter()
        self._sampling.load(batch.loads)
        updates = batch.page_updates
        self._table[updates.rows, updates.columns] = updates.pages
        inputs = host_inputs(batch, self._table, self.page_size)
        self._write_forward(batch, inputs.slots)
        key = (padded(batch.num_tokens, decode=_decodes(batch)), _decodes(batch)) if _is_small(batch) else None
        if key is not None and key not in self._graphs:
            self._capture(key)
        host = self._costs.forward_host_s(len(batch.rows)) if key is not None else self._costs.eager
        self._launch(began + self._slower * host)
        self._queue(self._costs.device_s(batch), since=began if key is None else None)

    def mask_buffer(self) -> Bitmask:
        """Of the step whose forward was queued last."""
        first = (self._posted % 2) * self.mask_rows
        return self.jobs.masks[first : first + self.mask_rows]

    def sample(self, batch: Batch) -> SimulatedPending:
        began = time.perf_counter()
        plan = self._planner.plan(batch)
        scores = StepScores(batch, plan, self._sampling.logprobs)
        slot = self._posted % model.SLOTS
        self._write_sample(slot, batch, plan)
        self._posted += 1
        self.jobs.bell[model.POSTED] = self._posted
        host = self._costs.sample_host_s(len(batch.rows)) + (20e-6 if batch.kept_masks else 0.0)
        self._launch(began + self._slower * host)
        self._queue(self._costs.sample)
        drawn = DrawnRows(len(batch.rows), np.flatnonzero(batch.samples), plan)
        pending = SimulatedPending(self, self._posted, slot, self._free_at, drawn, scores)
        key = self._wanted.take(idle=False)
        if key is not None:
            self._wanted.spend(self._capture(key))
        return pending

    def caught_up(self) -> bool:
        return time.perf_counter() >= self._free_at

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        if num_tokens > MAX_SMALL:
            return None
        decode = num_tokens == num_rows
        key = padded(num_tokens, decode=decode), decode
        if not decode and key not in self._graphs:
            self._wanted.ask(key)
            return None
        read = int(self._read * num_rows)
        return self._slower * (self._costs.base_s(num_tokens) + self._costs.kv_token * read)

    def rest(self) -> bool:
        key = self._wanted.take(idle=True)
        if key is not None:
            self._capture(key)
        return key is not None

    def close(self) -> None:
        self.jobs.bell[model.QUIT] = 1

    # -- the device

    _read = 256.0  # cached tokens a row of the last step

    def _queue(self, seconds: float, *, since: float | None = None) -> None:
        """Behind what the device does already. `since`: its kernels were launched one by one from then on, and it did
        not wait for the last to begin with the first."""
        now, seconds = time.perf_counter(), seconds * self._slower
        begin = now if since is None else since
        if begin > self._free_at and self._free_at:
            gap = begin - self._free_at
            self.idle_s += gap if gap < 0.05 else 0.0  # longer: nobody asked for anything
        self._free_at = max(max(begin, self._free_at) + seconds, now)
        self.device_s += seconds

    def _capture(self, key: tuple[int, bool]) -> float:
        """Seconds."""
        began = time.perf_counter()
        self._launch(began + self._slower * CAPTURE_S)
        self._graphs.add(key)
        return time.perf_counter() - began

    def _launch(self, until: float) -> None:
        """The host is busy with calls of the driver until then."""
        burst = _BURST * self._slower
        while not self.idles and (now := time.perf_counter()) < until:
            end = min(until, now + burst)
            while time.perf_counter() < end:
                pass
            left = min(until - time.perf_counter(), burst)
            if left > 0:
                _spin(int(left * self._rounds))

    def _write_forward(self, batch: Batch, places: NDArray[np.int32]) -> None:
        jobs, slot, rows = self.jobs, self._posted % model.SLOTS, len(batch.rows)
        starts = batch.starts
        self._read = float(starts.mean())
        last = np.maximum(starts - 1, 0)
        before = self._table[batch.rows, last // self.page_size] * self.page_size + last % self.page_size
        jobs.before[slot, :rows] = np.where(starts > 0, before, -1)
        jobs.rows[slot, :rows] = batch.rows
        jobs.num_new[slot, :rows] = batch.num_new
        jobs.num_logits[slot, :rows] = batch.num_logits
        jobs.tokens[slot, : batch.num_tokens] = batch.token_ids
        jobs.places[slot, : batch.num_tokens] = places
        jobs.header[slot, model.N] = rows

    def _write_sample(self, slot: int, batch: Batch, plan: SamplePlan) -> None:
        jobs, draws, rows, kept = self.jobs, len(plan.draw_rows), len(plan.rows), len(batch.kept_masks)
        jobs.index[slot, :draws] = plan.logits_index
        jobs.mask_index[slot, :draws] = plan.mask_index
        jobs.drafts[slot, :draws] = plan.draft_ids
        jobs.heat[slot, :draws] = plan.temperature
        if plan.flags.random:
            jobs.keys[slot, :draws] = plan.keys
        jobs.draw_rows[slot, :rows] = plan.rows
        jobs.first[slot, :rows] = plan.first_draw
        jobs.draws[slot, :rows] = plan.num_draws
        if kept:
            jobs.kept[slot, :kept] = batch.kept_masks
        jobs.header[slot, model.S], jobs.header[slot, model.R], jobs.header[slot, model.K] = draws, rows, kept


@dataclass
class SimulatedPending:
    executor: SimulatedExecutor
    number: int
    slot: int
    ready_at: float
    drawn: DrawnRows
    scores: StepScores
    result: StepResult | None = None

    def wait(self) -> StepResult:
        if self.result is None:
            self._until_ready()
            copies = self._copies()
            self.result = self.drawn.collect(copies)
            self.scores.collect(copies, self.result)
        return self.result

    def _until_ready(self) -> None:
        left = self.ready_at - time.perf_counter()
        if left > _SLEEP:
            time.sleep(left - _SLEEP)
        rounds = int(2e-6 * self.executor._rounds)
        while time.perf_counter() < self.ready_at:
            time.sleep(20e-6) if self.executor.idles else _spin(rounds)
        bell, began = self.executor.jobs.bell, time.perf_counter()
        while bell[model.DONE] < self.number:
            time.sleep(10e-6)  # its thread may want this core
        self.executor.late_s += time.perf_counter() - began

    def _copies(self) -> Mapping[str, NDArray[Any]]:
        jobs, slot, plan = self.executor.jobs, self.slot, self.drawn.plan
        draws, rows = len(plan.draw_rows), len(plan.rows)
        copies: dict[str, NDArray[Any]] = {
            "tokens": jobs.drawn[slot, :draws].copy(),
            "num_accepted": jobs.accepted[slot, :rows].copy(),
            "status": jobs.status[slot, :draws].copy(),
        }
        return copies | self._scores(copies["tokens"])

    def _scores(self, tokens: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Numbers between -8 and 0 that the text decides."""
        found: dict[str, NDArray[Any]] = {}
        context = self.executor.jobs.context[self.slot]
        scored = self.scores._scored
        if scored:
            places = np.concatenate([row.positions + row.first for row in scored])
            ids = np.concatenate([row.targets for row in scored if row.targets is not None])
            found["targets"] = -8 * model.hash_at(context[places], ids)
        for row in self.scores._rows:
            if row.targets is None:
                found[f"chosen{row.index}"] = -8 * model.hash_at(context[row.first : row.last], tokens[row.draws])
            if row.top:
                shape = row.last - row.first, row.top
                found[f"top{row.index}"] = np.broadcast_to(-1.0 - np.arange(row.top, dtype=np.float32), shape)
                found[f"top_ids{row.index}"] = np.broadcast_to(np.arange(row.top, dtype=np.int32) + 1000, shape)
        return found


def _is_small(batch: Batch) -> bool:
    return batch.num_tokens <= MAX_SMALL


def _decodes(batch: Batch) -> bool:
    return batch.num_tokens == len(batch.rows) and not batch.loads


def _calibrated() -> float:
    """Rounds of `_spin` in a second."""
    _spin(1000)
    began = time.perf_counter()
    _spin(1_000_000)
    return 1_000_000 / (time.perf_counter() - began)
