"""How much Python runs in a decode step: counted in calls, since times depend on the machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.protocol import GenerateRequest, SamplingParams
from sglite.runtime.batch import NO_MASK, Batch, StepResult
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import EngineCore
from tests.fakes.executor import ScriptedExecutor, ScriptedPending
from tests.fakes.tokenizer import ByteTokenizer

_STEPS = 20
_SCHEMA = {"type": "array", "minItems": 64, "items": {"type": "string"}}  # a handful of positions, soon all known


class Uncounted(ScriptedExecutor):
    """Draws at random among the allowed tokens; what it calls is not counted."""

    def __init__(self, rows: int) -> None:
        super().__init__(num_pages=64 * 1024, max_rows=rows, max_len=1024, overlaps=True, kept_mask_rows=4000)
        self._rng = np.random.default_rng(0)
        self._ids: dict[int, np.ndarray] = {}

    def forward(self, batch: Batch) -> None:
        """Nothing."""

    def sample(self, batch: Batch) -> ScriptedPending:
        profile = sys.getprofile()
        sys.setprofile(None)
        for slot, place in batch.kept_masks:
            self._ids[self.mask_rows + place] = bitmask.ids(self._mask[slot])
        tokens = np.array([[self._drawn(int(slot))] for slot in batch.mask_slots], np.int32)
        sys.setprofile(profile)
        return ScriptedPending(StepResult(batch.samples.astype(np.int32), tokens), fails=False)

    def _drawn(self, slot: int) -> int:
        if slot == NO_MASK:
            return 65
        ids = self._ids[slot] if slot >= self.mask_rows else bitmask.ids(self._mask[slot])
        return int(ids[self._rng.integers(len(ids))])


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Vocab.of(ByteTokenizer()), CompilerConfig(isolate=False))
    made.compile_now(spec.json_schema(_SCHEMA))
    yield made
    made.close()


def calls(grammars: Any, rows: int, *, constrained: bool) -> float:
    """Calls of a step of so many rows, Python's and C's, the positions of the grammar being known."""
    core = EngineCore(Uncounted(rows), ByteTokenizer(), grammars, EngineConfig(prefix_cache=False), max_model_len=1024)
    grammar = spec.json_schema(_SCHEMA) if constrained else None
    counted: list[int] = []

    def count(frame: object, event: str, argument: object) -> None:
        counted[-1] += event in ("call", "c_call")

    for i in range(rows):
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        prompt = (i, *b"prompt")
        core.add(
            GenerateRequest(request_id=str(i), prompt=prompt, sampling_params=sampling, grammar=grammar, stream=False)
        )
    for _ in range(25 if constrained else 5):
        core.step()
    for _ in range(_STEPS):
        counted.append(0)
        sys.setprofile(count)
        core.step()
        sys.setprofile(None)
    assert core.metrics.running == rows
    core.close()
    return statistics.quantiles(counted, n=4)[0]  # a step now and then meets a new position, or is ahead


def test_a_free_row_costs_no_call_of_its_own(grammars: GrammarCompiler) -> None:
    few, many = (calls(grammars, rows, constrained=False) for rows in (8, 24))
    assert many - few < 0.3 * 16
    assert few < 220  # 144


def test_a_constrained_row_costs_a_few_calls(grammars: GrammarCompiler) -> None:
    few, many = (calls(grammars, rows, constrained=True) for rows in (8, 24))
    assert (many - few) / 16 < 14, "a loop over the rows calls something new"  # 9; it was 18
    assert few < 400  # 278
