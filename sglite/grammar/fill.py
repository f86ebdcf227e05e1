"""Masks of many rows at once, in native threads without the interpreter lock.

Steps of one call: peel the layers off each matcher down to the native one, group the native ones by engine,
let each engine fill its group in parallel, then let the layers narrow their rows, innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        failures: dict[int, Exception] = {}
        layers = [_peel(matcher) for matcher in matchers]
        native: list[tuple[llguidance.LLMatcher, int]] = []
        for i, row in enumerate(rows):
            base = layers[i][-1]
            if isinstance(base, LLGuidanceMatcher):
                native.append((base.native, row))
        if native:
            height, width = bitmask.shape
            self._executor.unsafe_compute_mask_ptr(native, bitmask.ctypes.data, width * 4, height)
        for i, row in enumerate(rows):
            try:
                _finish(layers[i], bitmask[row])
            except GrammarViolation as error:
                failures[i] = error
        return failures


def _peel(matcher: Matcher) -> list[Matcher]:
    """The matcher, what is below it, and so on down to the one that fills itself."""
    chain = [matcher]
    while isinstance(matcher, Layer):
        below = matcher.below
        if below is None:
            break
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
