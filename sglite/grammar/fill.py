"""Masks of many rows at once, in native threads without the interpreter lock.

Steps of one call: peel the layers off each matcher down to the native one, group the native ones by engine,
let each engine fill its group in parallel, then let the layers narrow their rows, innermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import llguidance
import numpy as np

from sglite.errors import GrammarViolation
from sglite.grammar.engines.llguidance import LLGuidanceMatcher
from sglite.grammar.matcher import Bitmask, Matcher


@runtime_checkable
class Layer(Protocol):
    """A matcher around another one that only takes tokens away from its mask."""

    @property
    def below(self) -> Matcher | None:
        """Whose mask this one starts from, here; None: `fill` does it all itself."""
        ...

    def finish_fill(self, row: Bitmask) -> None:
        """Narrow a row that holds the mask of `below`. Raises GrammarViolation."""
        ...


class BatchFiller:
    """See `sglite.grammar.matcher.BatchFiller`. One thread calls it at a time."""

    def __init__(self, num_threads: int) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], bitmask: Bitmask) -> dict[int, Exception]:
        assert bitmask.flags.c_contiguous and bitmask.dtype == np.int32 and bitmask.ndim == 2
        plain: list[tuple[int, LLGuidanceMatcher, int]] = []  # nearly all: nothing around the native matcher
        layered: list[tuple[int, list[Matcher], int]] = []
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if type(matcher) is LLGuidanceMatcher:
                plain.append((i, matcher, row))
            else:
                layered.append((i, _peel(matcher), row))
        bases = [(matcher, row) for _, matcher, row in plain]
        bases += [(chain[-1], row) for _, chain, row in layered if type(chain[-1]) is LLGuidanceMatcher]
        if bases:
            # Each thread takes a run of neighbours: those that share a lock should be in one.
            bases.sort(key=lambda base: base[0].lock_group)
            native = [(matcher.native, row) for matcher, row in bases]
            height, width = bitmask.shape
            self._executor.unsafe_compute_mask_ptr(native, bitmask.ctypes.data, width * 4, height)
        failures: dict[int, Exception] = {}
        for i, matcher, row in plain:
            if matcher.needs_finish:
                _guard(failures, i, matcher.finish_fill, bitmask[row])
        for i, chain, row in layered:
            _guard(failures, i, lambda row, chain=chain: _finish(chain, row), bitmask[row])
        return failures


def _guard(failures: dict[int, Exception], i: int, finish: Callable[[Bitmask], None], row: Bitmask) -> None:
    try:
        finish(row)
    except GrammarViolation as error:
        failures[i] = error


def _peel(matcher: Matcher) -> list[Matcher]:
    """The matcher, what is below it, and so on down to the one that fills itself."""
    chain = [matcher]
    while (below := getattr(matcher, "below", None)) is not None:
        chain.append(below)
        matcher = below
    return chain


def _finish(chain: list[Matcher], row: Bitmask) -> None:
    base = chain[-1]
    if isinstance(base, LLGuidanceMatcher):
        base.finish_fill(row)
    else:
        base.fill(row)
    for layer in reversed(chain[:-1]):
        assert isinstance(layer, Layer)
        layer.finish_fill(row)
