"""Question: what does a step with forced text cost the host?

    python -m tests.bench.jump_host TOKENIZER_FOLDER [--case keys_32] [--profile]

An engine core over an executor that computes nothing: it draws at random among what the masks allow, and says that a
step takes `--step-ms`. Prints microseconds a step of each phase, with forced text entering in turns and drawn.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from typing import Any

import numpy as np

from sglite.bench.structured.cases import case
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.protocol import GenerateRequest, RequestOutput, SamplingParams
from sglite.runtime.batch import NO_MASK, Batch, StepResult
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import EngineCore
from sglite.text.tokenizer import Tokenizer
from tests.fakes.executor import ScriptedExecutor, ScriptedPending


class DrawingExecutor(ScriptedExecutor):
    """Draws at random among the allowed tokens."""

    def __init__(self, vocab_size: int, *, step_s: float) -> None:
        super().__init__(num_pages=200_000, vocab_size=vocab_size, max_rows=256, overlaps=True, kept_mask_rows=6000)
        self._step_s = step_s
        self._rng = np.random.default_rng(1)
        self._ids: dict[int, np.ndarray] = {}  # of kept masks, by place

    def step_seconds(self, num_rows: int, num_tokens: int) -> float:
        return self._step_s

    def forward(self, batch: Batch) -> None:
        """Nothing."""

    def sample(self, batch: Batch) -> ScriptedPending:
        for slot, place in batch.kept_masks:
            self._kept[place] = self._mask[slot]
            self._ids.pop(place, None)
        slots = batch.mask_slots[np.cumsum(batch.num_logits) - 1]
        tokens = [self._draw(slot) if samples else -1 for slot, samples in zip(slots, batch.samples, strict=True)]
        return ScriptedPending(
            StepResult(batch.samples.astype(np.int32), np.array(tokens, np.int32)[:, None]), fails=False
        )

    def _draw(self, slot: int) -> int:  # type: ignore[override]
        if slot == NO_MASK:
            return 7
        if slot < self.mask_rows:
            ids = bitmask.ids(self._mask[slot])
        else:
            place = int(slot) - self.mask_rows
            found = self._ids.get(place)
            ids = self._ids[place] = bitmask.ids(self._kept[place]) if found is None else found
        return int(ids[self._rng.integers(len(ids))])


def run(core: EngineCore, name: str, *, jump: bool, seed: int) -> int:
    """Steps."""
    one, steps = case(name), core.metrics.steps
    sampling = SamplingParams(max_tokens=one.output, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(one.prompts(1000, seed=str(seed))):
        core.add(
            GenerateRequest(
                request_id=f"{seed}/{i}",
                prompt=prompt,
                sampling_params=sampling,
                grammar=spec.json_schema(one.schema),
                jump_forward=jump,
                stream=False,
            )
        )
    left = one.rows
    while left:
        if not core.has_work:
            time.sleep(0.001)  # the constraint is being compiled
        left -= sum(isinstance(o, RequestOutput) and o.finished for o in core.step())
    return core.metrics.steps - steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--case", default="keys_32")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_folder(given.tokenizer)
    vocab = Vocab.of(tokenizer)
    grammars: Any = GrammarCompiler(vocab, CompilerConfig(isolate=False))
    for jump, step_ms in ((False, given.step_ms), (True, 0.01), (True, given.step_ms)):
        executor = DrawingExecutor(vocab.size, step_s=step_ms / 1e3)
        core = EngineCore(executor, tokenizer, grammars, EngineConfig(), max_model_len=2048)
        for seed in range(2):
            run(core, given.case, jump=jump, seed=seed)
        metrics = core.metrics
        names = ("schedule_s", "forward_s", "mask_s", "sample_s", "apply_s")
        before = {name: getattr(metrics, name) for name in names}
        tokens = metrics.completion_tokens
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        steps = run(core, given.case, jump=jump, seed=9)
        profile.disable()
        times = {name[:-2]: round(1e6 * (getattr(metrics, name) - before[name]) / steps) for name in names}
        way = "drawn" if not jump else "overlapped" if step_ms < 0.1 else "in turns"
        print(f"{way:10} {steps} steps, {(metrics.completion_tokens - tokens) / steps:.1f} tokens each, us: {times}")
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
