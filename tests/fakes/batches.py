"""Batches made by hand, and a loop that drives an executor with them: no scheduler, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglite.runtime.batch import (
    DEVICE_TOKEN,
    GREEDY,
    NO_MASK,
    Batch,
    Executor,
    IntArray,
    PageUpdates,
    RowLoad,
    RowSampling,
    StepResult,
)

RANDOM = replace(GREEDY, temperature=1.0)


@dataclass
class Part:
    """What one row does in a step."""

    row: int
    start: int
    tokens: Sequence[int]
    num_logits: int = 1
    samples: bool = True
    num_drafts: int = 0
    output_index: int = 0
    masks: Sequence[int] = ()
    wants_logprobs: bool = False
    targets: Sequence[int] | None = None
    target_positions: Sequence[int] | None = None


def ints(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int32)


def make_batch(
    parts: Sequence[Part],
    *,
    step: int = 0,
    loads: Sequence[RowLoad] = (),
    updates: Sequence[tuple[int, int, int]] = (),  # (row, column, page)
    shared: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> Batch:
    masks = [m for p in parts for m in (p.masks or [NO_MASK] * p.num_logits)]
    return Batch(
        step=step,
        rows=ints([p.row for p in parts]),
        starts=ints([p.start for p in parts]),
        num_new=ints([len(p.tokens) for p in parts]),
        token_ids=ints([t for p in parts for t in p.tokens]),
        num_logits=ints([p.num_logits for p in parts]),
        samples=np.array([p.samples for p in parts]),
        num_drafts=ints([p.num_drafts for p in parts]),
        output_index=ints([p.output_index for p in parts]),
        mask_slots=ints(masks),
        logprob_rows=ints([i for i, p in enumerate(parts) if p.wants_logprobs]),
        target_ids={i: ints(p.targets) for i, p in enumerate(parts) if p.targets is not None},
        target_positions={i: ints(p.target_positions) for i, p in enumerate(parts) if p.target_positions is not None},
        loads=tuple(loads),
        page_updates=PageUpdates(*(ints([u[i] for u in updates]) for i in range(3))),
        shared_prefixes=shared,
    )


def load_row(row: int, sampling: RowSampling = GREEDY, *, prompt: Sequence[int] | None = None) -> RowLoad:
    return RowLoad(row, sampling, None if prompt is None else ints(prompt), None)


def run_step(executor: Executor, batch: Batch, masks: Sequence[Sequence[int]] = ()) -> StepResult:
    """`masks[i]`: the tokens that row i of the mask buffer allows."""
    executor.forward(batch)
    buffer = executor.mask_buffer()
    for i, allowed in enumerate(masks):
        write_mask(buffer[i], allowed)
    return executor.sample(batch).wait()


def write_mask(row: IntArray, allowed: Sequence[int]) -> None:
    bits = np.zeros(row.shape[0] * 32, np.uint8)
    bits[list(allowed)] = 1
    row[:] = np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class Driver:
    """Rows that only ever get new pages from a counter: enough to run prompts to their end."""

    executor: Executor
    next_page: int = 0
    step: int = 0
    pages: dict[int, list[int]] = field(default_factory=dict)

    def share(self, source: int, target: int, tokens: int) -> None:
        """The target row begins with the pages of the source row's first tokens. Before the target's first step."""
        assert tokens % self.executor.page_size == 0
        self.pages[target] = self.pages[source][: tokens // self.executor.page_size]

    def run(
        self,
        parts: Sequence[Part],
        *,
        loads: Sequence[RowLoad] = (),
        shared: tuple[tuple[int, tuple[int, ...]], ...] = (),
        masks: Sequence[Sequence[int]] = (),
    ) -> StepResult:
        updates = [(load.row, i, page) for load in loads for i, page in enumerate(self.pages.get(load.row, ()))]
        for part in parts:
            updates += self._grow(part.row, part.start + len(part.tokens))
        batch = make_batch(parts, step=self.step, loads=loads, updates=updates, shared=shared)
        self.step += 1
        return run_step(self.executor, batch, masks)

    def _grow(self, row: int, length: int) -> list[tuple[int, int, int]]:
        """Pages for `length` tokens of a row, as updates."""
        pages = self.pages.setdefault(row, [])
        first, needed = len(pages), -(-length // self.executor.page_size)
        pages += range(self.next_page, self.next_page + needed - first)
        self.next_page += max(0, needed - first)
        return [(row, i, pages[i]) for i in range(first, needed)]


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    sampling: RowSampling | Sequence[RowSampling] = GREEDY,
    chunk: int | None = None,
) -> list[list[int]]:
    """All prompts side by side, one row each. `chunk`: at most that many prompt tokens of a row in a step."""
    driver = Driver(executor)
    each = [sampling] * len(prompts) if isinstance(sampling, RowSampling) else list(sampling)
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    loads = [load_row(i, each[i], prompt=p) for i, p in enumerate(prompts)]
    while any(len(o) < steps for o in outputs):
        parts = []
        for i, prompt in enumerate(prompts):
            if len(outputs[i]) == steps:
                continue
            left = list(prompt[done[i] :])
            if left:
                new = left[: chunk or len(left)]
                last = len(new) == len(left)
                parts.append(Part(i, done[i], new, num_logits=int(last), samples=last))
            else:
                parts.append(Part(i, done[i], [DEVICE_TOKEN], output_index=len(outputs[i])))
        result = driver.run(parts, loads=loads)
        loads = []
        for j, part in enumerate(parts):
            done[part.row] += len(part.tokens)
            outputs[part.row] += result.tokens[j, : result.num_accepted[j]].tolist()
    return outputs
