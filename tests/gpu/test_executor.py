"""The model runner on a GPU against the same on the CPU and against transformers, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglite.runtime.batch import DEVICE_TOKEN
from sglite.runtime.device.cuda.attention import CudaAttention
from sglite.runtime.device.cuda.planner import RaggedPlanner
from sglite.runtime.executor.model_runner import ModelRunner
from tests.fakes.batches import GREEDY, Driver, Part, generate, load_row
from tests.fakes.tiny_models import VOCAB, tiny_executor
from tests.gpu.models import behind, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [np.random.default_rng(7).integers(0, 320, n).tolist() for n in (5, 1, 40, 90)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model with heads of 64, for which there are kernels, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(request.param, folder)
    return folder, model


def test_float32_gives_the_tokens_of_the_cpu(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    sampling = [GREEDY, replace(GREEDY, temperature=0.8, seed=5), GREEDY, replace(GREEDY, presence_penalty=0.5)]
    want = generate(tiny_executor(folder, dtype="float32"), PROMPTS, 20, sampling=sampling)
    assert generate(tiny_executor(folder, device="cuda", dtype="float32"), PROMPTS, 20, sampling=sampling) == want


@pytest.mark.parametrize("chunk", [None, 16])
def test_bfloat16_chooses_tokens_that_the_reference_ranks_first(saved: tuple[Path, Any], chunk: int | None) -> None:
    folder, model = saved
    executor = tiny_executor(folder, device="cuda", dtype="bfloat16")
    for prompt, output in zip(PROMPTS, generate(executor, PROMPTS, 40, chunk=chunk), strict=True):
        assert behind(model, prompt, output, VOCAB) < 0.25


def test_large_steps_choose_them_too(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    executor = tiny_executor(folder, device="cuda", dtype="bfloat16", num_pages=2000)
    prompts = [np.random.default_rng(8).integers(0, 320, n).tolist() for n in (200, 230, 180)]  # more than a small step
    for prompt, output in zip(prompts, generate(executor, prompts, 4), strict=True):
        assert behind(model, prompt, output, VOCAB) < 0.25


def test_queries_that_nobody_reads_are_left_out_of_the_last_layer(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    leaves_out = CudaAttention.leaves_out
    monkeypatch.setattr(CudaAttention, "leaves_out", lambda self, batch: False)
    want = scores_of_large_steps(tiny_executor(saved[0], device="cuda", dtype="bfloat16", num_pages=2000))
    monkeypatch.setattr(
        CudaAttention, "leaves_out", lambda self, batch: (chosen.append(leaves_out(self, batch)), chosen[-1])[1]
    )
    got = scores_of_large_steps(tiny_executor(saved[0], device="cuda", dtype="bfloat16", num_pages=2000))
    assert chosen == [True, True]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


def scores_of_large_steps(executor: ModelRunner) -> list[Any]:
    """Rows that want no logits, one or several, in two steps one after the other."""
    driver, rng, found = Driver(executor), np.random.default_rng(3), []
    for starts, counts, logits in (
        ((0, 0, 0, 0, 0), (110, 120, 90, 125, 115), (1, 0, 5, 1, 0)),
        ((110, 120, 90, 125, 115), (125, 110, 120, 60, 119), (0, 3, 1, 1, 0)),
    ):
        parts = [
            Part(i, start, rng.integers(0, VOCAB, count).tolist(), num_logits=wanted, samples=False,
                 targets=rng.integers(0, VOCAB, wanted).tolist() if wanted else None)
            for i, (start, count, wanted) in enumerate(zip(starts, counts, logits, strict=True))
        ]  # fmt: skip
        result = driver.run(parts, loads=[] if starts[0] else [load_row(i) for i in range(len(parts))])
        assert not result.errors
        found += [result.chosen_logprobs[i] for i, wanted in enumerate(logits) if wanted]
    return found


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "behind cached tokens"])
def test_long_rows_choose_them_too(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """fa3: of new keys where they were made, or through the pages; what is written to the cache is read afterwards."""
    monkeypatch.setattr("sglite.runtime.device.cuda.planner._LONG_ROWS", 64)
    folder, model = saved
    executor = tiny_executor(folder, device="cuda", dtype="bfloat16", num_pages=2000)
    chosen: list[bool] = []
    plan = RaggedPlanner.plan
    monkeypatch.setattr(RaggedPlanner, "plan", lambda self, batch: (plan(self, batch), chosen.append(self.from_pages)))
    prompts = [np.random.default_rng(9).integers(0, 320, n).tolist() for n in (240, 230, 235, 220, 238, 226, 233)]
    outputs = generate(executor, prompts, 4, chunk=120 if cached else None)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert behind(model, prompt, output, VOCAB) < 0.25
    assert chosen == ([False, True] if cached else [False])


def test_shared_pages_drafts_masks_and_scores_are_those_of_the_cpu(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    want = scenario(tiny_executor(folder, dtype="float32"))
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.3)):
        got = scenario(tiny_executor(folder, device="cuda", dtype=dtype))
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=tolerance)


def scenario(executor: ModelRunner) -> list[Any]:
    """Tokens under a mask of one, so that rounding cannot change them, and logprobs."""
    driver, prompt = Driver(executor), PROMPTS[2][:12]
    driver.run([Part(0, 0, prompt, num_logits=0, samples=False)], loads=[load_row(0)])
    driver.share(0, 1, 12)
    first = driver.run(
        [Part(0, 12, [5], masks=[3]), Part(1, 12, [9, 4, 3], num_logits=3, num_drafts=2, masks=[0, 1, 2])],
        loads=[load_row(1)],
        masks=[[4], [3], [7], [11]],
    )
    second = driver.run(
        [
            Part(0, 13, [DEVICE_TOKEN], masks=[0], wants_logprobs=True),
            Part(1, 15, [DEVICE_TOKEN], masks=[1], wants_logprobs=True),
            Part(2, 0, [1, 2, 3], num_logits=3, samples=False, targets=[2, 3, 4]),
        ],
        loads=[load_row(2)],
        masks=[[21], [22]],
    )
    assert not first.errors and not second.errors
    logprobs = [second.chosen_logprobs[i] for i in range(3)]
    return [first.num_accepted, first.tokens, second.tokens, *logprobs]
