"""Masks that the device keeps, and graphs that are captured before they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglite.runtime.batch import DEVICE_TOKEN
from tests.fakes.batches import Part, generate, load_row, make_batch, run_step
from tests.fakes.tiny_models import VOCAB, tiny_executor
from tests.gpu.models import behind, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_kept_mask_rules_later_steps_by_its_place(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    executor = tiny_executor(tmp_path, device="cuda", dtype="bfloat16")
    assert executor.kept_mask_rows > 100
    memory = executor.mask_rows
    batch = make_batch(
        [Part(0, 0, [3], masks=[0]), Part(1, 0, [4], masks=[1])],
        loads=[load_row(0), load_row(1)], updates=[(0, 0, 0), (1, 0, 1)],
    )  # fmt: skip
    batch.kept_masks.extend([(0, 7), (1, 99)])
    assert run_step(executor, batch, [[11], [12]]).tokens[:, 0].tolist() == [11, 12]
    for start in range(1, 5):  # launched singly, then from a graph
        parts = [
            Part(0, start, [DEVICE_TOKEN], masks=[memory + 99]),
            Part(1, start, [DEVICE_TOKEN], masks=[memory + 7]),
        ]
        batch = make_batch(parts, updates=[(0, start, 2 * start), (1, start, 2 * start + 1)])
        assert run_step(executor, batch).tokens[:, 0].tolist() == [12, 11]


def test_graphs_captured_ahead_change_no_token(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path)
    prompts = [np.random.default_rng(7).integers(0, 320, n).tolist() for n in (5, 1, 40, 90)]
    executor = tiny_executor(tmp_path, device="cuda", dtype="bfloat16")
    generate(executor, prompts[:1], 2)  # its tables are known from the first step on
    captured = len(executor._forward._graphs)  # type: ignore[attr-defined]
    for _ in range(12):
        executor.rest()
    assert len(executor._forward._graphs) > captured + 8  # type: ignore[attr-defined]
    for prompt, output in zip(prompts, generate(executor, prompts, 30, chunk=16), strict=True):
        assert behind(model, prompt, output, VOCAB) < 0.25


def test_a_size_that_is_wanted_is_captured_between_steps_and_measured(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path)
    executor = tiny_executor(tmp_path, device="cuda", dtype="bfloat16")
    prompt = np.random.default_rng(3).integers(0, 320, 20).tolist()
    generate(executor, [prompt], 4)
    assert executor.step_seconds(1, 8) is None
    for _ in range(60):
        executor.step_seconds(1, 8)
    outputs = generate(executor, [prompt], 4)  # as long as before: how KV is cut belongs to a graph
    assert executor.step_seconds(1, 8) == 0.0  # ready, and not measured yet
    assert behind(model, prompt, outputs[0], VOCAB) < 0.25
    chunked = generate(executor, [prompt], 4, chunk=8)
    assert behind(model, prompt, chunked[0], VOCAB) < 0.25
    torch.cuda.synchronize()
    assert 0.0 < (executor.step_seconds(1, 1) or 0.0) < 0.1
