"""A step's host numbers on their way to the GPU: one pinned buffer, one copy, views of it for every kernel.

Small steps are padded to a captured size and keep their place in memory, so that a graph can be replayed over them.
In that form every new token is a row of its own for the attention kernel:

    counts | token_ids [tokens] | token_rows [tokens] | positions [tokens] | slots [tokens] | logits_index [logits]
           | page updates: flat index [updates] | page [updates]

Padding tokens have position and slot -1, which every kernel skips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import NO_MASK, Batch, IntArray, PageUpdates
from sglite.runtime.device.base import ForwardBatch, RowTables
from sglite.runtime.device.cuda.kernels.elementwise import prepare_kernel
from sglite.runtime.device.cuda.tree_plan import TreeKey
from sglite.runtime.device.inputs import HostInputs

MAX_SMALL = 1024  # tokens of a step that is padded and captured
_ALIGNED = 16  # int32 words: Triton compiles a kernel again for a pointer that is not 64 bytes aligned

_RING = 4  # steps that may be in flight, with one to spare
SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, *range(32, 128, 8), *range(128, 256, 16), *range(256, MAX_SMALL + 1, 32))

# Of steps that come in many shapes. 64 tokens take no longer than 48 do, nor 128 than 96 (H200, 0.6B and 8B).
COARSE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, *range(512, MAX_SMALL + 1, 64))


def padded(count: int, *, coarse: bool) -> int:
    """The captured size for that many tokens."""
    return next(size for size in (COARSE if coarse else SIZES) if size >= count)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What tells captured graphs apart."""

    tokens: int
    logits: int  # 0: of every token
    decode: bool  # one token a row and no row reads what another writes: append and attention are one kernel
    splits: int  # of each row's KV
    tree: TreeKey | None = None  # prefixes that rows share are read once


@dataclass(slots=True)
class CudaForwardBatch(ForwardBatch):
    """`key` None: a large step, not padded, `rows` and `num_new` are there. Else rows are tokens."""

    token_rows: torch.Tensor  # int32[T]: of the page table
    key: GraphKey | None = None
    page_size: int = 1
    num_logits: int = 0

    @property
    def selected(self) -> torch.Tensor | None:
        """A graph looks logits up, or does not, for every step that it serves."""
        if self.key is None:
            return None if len(self.batch.mask_slots) == self.batch.num_tokens else self.logits_index
        return self.logits_index if self.key.logits else None


class Sections:
    """Named parts of one int32 buffer, each aligned."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.places: dict[str, slice] = {}
        self.words = 0
        for name, size in sizes.items():
            self.places[name] = slice(self.words, self.words + size)
            self.words += -(-max(size, 1) // _ALIGNED) * _ALIGNED

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: buffer[place] for name, place in self.places.items()}


class PinnedRing:
    """Pinned buffers of one size in turn. One is handed out again when the copy that was made from (or to) it is over,
    which with as many buffers as steps can be in flight it always is."""

    def __init__(self, words: int) -> None:
        self._tensors = torch.zeros((_RING, words), dtype=torch.int32, pin_memory=True).unbind()  # one allocation
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0

    def take(self) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """The next buffer, as both. The same one again as long as nothing is `sent`."""
        self._events[self._turn].synchronize()
        return self._tensors[self._turn], self._arrays[self._turn]

    def sent(self) -> torch.cuda.Event:
        """The copy of the buffer taken last is queued; the event tells when it is over."""
        event = self._events[self._turn]
        event.record()
        self._turn = (self._turn + 1) % _RING
        return event


class SmallStep:
    """The place of one padded size: its buffer on the GPU and how the host fills it."""

    def __init__(self, tokens: int, logits: int, device: torch.device) -> None:
        self.updates = 2 * tokens + 16
        self._sections = Sections(
            {
                "counts": 2, "token_ids": tokens, "token_rows": tokens, "positions": tokens, "slots": tokens,
                "logits_index": logits or tokens, "update_index": self.updates, "update_pages": self.updates,
            }
        )  # fmt: skip
        self._empty = np.zeros(self._sections.words, np.int32)
        for name in ("positions", "slots"):
            self._empty[self._sections.places[name]] = -1
        self._buffer = torch.zeros(self._sections.words, dtype=torch.int32, device=device)
        self._ring = PinnedRing(self._sections.words)
        self.views = self._sections.views(self._buffer)

    def send(self, batch: Batch, inputs: HostInputs, tables: RowTables) -> None:
        """A row that comes with a long cached prefix has more page updates than fit: they go ahead by themselves."""
        updates, table_width = batch.page_updates, tables.host_page_table.shape[1]
        if len(updates) > self.updates:
            send_updates(updates, tables)
            updates = PageUpdates(updates.rows[:0], updates.columns[:0], updates.pages[:0])
        pinned, host = self._ring.take()
        host[:] = self._empty
        fill(
            host,
            self._sections,
            token_ids=batch.token_ids,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            slots=inputs.slots,
            logits_index=inputs.logits_index,
            update_index=updates.rows * table_width + updates.columns,
            update_pages=updates.pages,
        )
        host[0], host[1] = batch.num_tokens, len(updates)
        self._buffer.copy_(pinned, non_blocking=True)
        self._ring.sent()


def small_batch(
    batch: Batch, views: dict[str, torch.Tensor], tables: RowTables, key: GraphKey, *, num_logits: int
) -> CudaForwardBatch:
    """A padded step, `views` being the place of its size."""
    return CudaForwardBatch(
        batch=batch,
        token_ids=views["token_ids"],
        positions=views["positions"],
        slots=views["slots"],
        page_table=tables.page_table,
        rows=views["token_rows"],
        token_rows=views["token_rows"],
        starts=views["positions"],
        num_new=views["counts"],
        logits_index=views["logits_index"],
        host_page_table=tables.host_page_table,
        key=key,
        page_size=tables.page_size,
        num_logits=num_logits,
    )


def fill(host: NDArray[np.int32], sections: Sections, **arrays: IntArray) -> None:
    for name, array in arrays.items():
        first = sections.places[name].start
        host[first : first + len(array)] = array


def send_updates(updates: PageUpdates, tables: RowTables) -> None:
    """Page updates alone, in memory of their own."""
    sections = Sections({"counts": 2, "update_index": len(updates), "update_pages": len(updates)})
    pinned = torch.empty(sections.words, dtype=torch.int32, pin_memory=True)
    fill(
        pinned.numpy(),
        sections,
        counts=np.array([0, len(updates)], np.int32),
        update_index=updates.rows * tables.host_page_table.shape[1] + updates.columns,
        update_pages=updates.pages,
    )
    views = sections.views(pinned.to(tables.page_table.device, non_blocking=True))
    launch_prepare(views | {"token_ids": views["counts"], "token_rows": views["counts"]}, tables, programs=16)


def send_large(batch: Batch, inputs: HostInputs, tables: RowTables) -> CudaForwardBatch:
    """A step of its own size, in memory of its own."""
    updates = batch.page_updates
    arrays = {
        "counts": np.array([batch.num_tokens, len(updates)], np.int32),
        "token_ids": batch.token_ids,
        "token_rows": inputs.token_rows,
        "positions": inputs.positions,
        "slots": inputs.slots,
        "logits_index": inputs.logits_index,
        "rows": batch.rows,
        "starts": batch.starts,
        "num_new": batch.num_new,
        "update_index": updates.rows * tables.host_page_table.shape[1] + updates.columns,
        "update_pages": updates.pages,
    }
    sections = Sections({name: len(array) for name, array in arrays.items()})
    pinned = torch.empty(sections.words, dtype=torch.int32, pin_memory=True)
    fill(pinned.numpy(), sections, **arrays)
    views = sections.views(pinned.to(tables.page_table.device, non_blocking=True))
    launch_prepare(views, tables, programs=16)
    return CudaForwardBatch(
        batch=batch,
        token_ids=views["token_ids"],
        positions=views["positions"],
        slots=views["slots"],
        page_table=tables.page_table,
        rows=views["rows"],
        token_rows=views["token_rows"],
        starts=views["starts"],
        num_new=views["num_new"],
        logits_index=views["logits_index"],
        host_page_table=tables.host_page_table,
        page_size=tables.page_size,
    )


def zeros(*, rows: int, tokens: int, start: int = 0) -> Batch:
    """A batch of which only the sizes matter: so many new tokens in each row, behind `start` cached ones."""
    every = np.arange(rows, dtype=np.int32)
    return Batch(
        step=0,
        rows=every,
        starts=np.full(rows, start, np.int32),
        num_new=np.full(rows, tokens, np.int32),
        token_ids=np.zeros(rows * tokens, np.int32),
        num_logits=np.ones(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        num_drafts=np.zeros(rows, np.int32),
        output_index=np.zeros(rows, np.int32),
        mask_slots=np.full(rows, NO_MASK, np.int32),
        logprob_rows=np.empty(0, np.int32),
    )


def launch_prepare(views: dict[str, torch.Tensor], tables: RowTables, *, programs: int) -> None:
    index = views["update_index"]
    stride = views["update_pages"].storage_offset() - index.storage_offset()
    prepare_kernel[(programs,)](
        views["token_ids"], views["token_rows"], tables.last_tokens, index, tables.page_table, views["counts"], stride,
        BLOCK=512,
    )  # fmt: skip
