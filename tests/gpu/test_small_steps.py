"""Steps up to 512 new tokens are a replay, whatever their shape, and give the model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglite.runtime.batch import DEVICE_TOKEN, IntArray
from sglite.runtime.executor.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.batches import Driver, Part, load_row
from tests.fakes.tiny_models import VOCAB, tiny_executor
from tests.gpu.models import behind, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CLOSE = 0.25


@pytest.fixture(scope="module", autouse=True)
def _long_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_SIZES", tiny_models._SIZES | {"max_position_embeddings": 1536})
        yield


def executor_of(folder: Path) -> ModelRunner:
    return tiny_executor(folder, device="cuda", dtype="bfloat16", num_pages=6000)


def graphs(executor: ModelRunner) -> Any:
    return executor._forward


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, tokens).tolist()


def decode(driver: Driver, row: int, start: int, first: IntArray, steps: int) -> list[int]:
    found = [int(first)]
    for i in range(steps):
        part = Part(row, start + i, [DEVICE_TOKEN], output_index=i + 1)
        found.append(int(driver.run([part]).tokens[0, 0]))
    return found


def test_a_row_with_a_long_cached_prefix_begins_with_a_small_step(tmp_path: Path) -> None:
    """It has more page updates than a padded step has places for."""
    model = save_tiny("qwen3", tmp_path)
    executor = executor_of(tmp_path)
    driver = Driver(executor)
    begins, ends = prompt(0, 400), [prompt(seed, 25) for seed in (1, 2, 3)]
    driver.run([Part(0, 0, begins)], loads=[load_row(0)])
    for row in (1, 2, 3):
        driver.share(0, row, 400)
    parts = [Part(row, 400, ends[row - 1]) for row in (1, 2, 3)]
    before = len(graphs(executor))
    drawn = driver.run(parts, loads=[load_row(row) for row in (1, 2, 3)], shared=((400, (0, 1, 2)),)).tokens
    assert len(graphs(executor)) == before + 1, "it went through a graph"
    for row in (1, 2, 3):
        end = ends[row - 1]
        assert behind(model, [*begins, *end], decode(driver, row, 425, drawn[row - 1, 0], 6), VOCAB) < CLOSE


@pytest.mark.parametrize("chunk", [20, 150, 500])
def test_a_prompt_in_pieces_reads_what_is_cached_of_it_together(tmp_path: Path, chunk: int) -> None:
    model = save_tiny("llama", tmp_path)
    driver = Driver(executor_of(tmp_path))
    ids = prompt(5, 1200)
    drawn = driver.run([Part(0, 0, ids[:chunk])], loads=[load_row(0)])
    for start in range(chunk, len(ids), chunk):
        drawn = driver.run([Part(0, start, ids[start : start + chunk])])
    assert behind(model, ids, decode(driver, 0, len(ids), drawn.tokens[0, 0], 3), VOCAB) < CLOSE


def test_the_second_run_of_mixed_prompts_captures_nothing(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    executor = executor_of(tmp_path)
    while executor.rest():
        pass
    found: list[int] = []
    for _ in range(2):
        driver, dice = Driver(executor), np.random.default_rng(1)
        driver.run([Part(0, 0, prompt(0, 300))], loads=[load_row(0)])
        for step in range(40):
            rows = [1 + int(row) for row in dice.permutation(7)[: 1 + step % 5]]
            for row in rows:
                driver.pages.pop(row, None)
                driver.share(0, row, 300)
            parts = [Part(row, 300, prompt(step, int(dice.integers(1, 90)))) for row in rows]
            shared = ((300, tuple(range(len(rows)))),) if len(rows) > 1 else ()
            driver.run(parts, loads=[load_row(row) for row in rows], shared=shared)
            driver.next_page = 400
        found.append(len(graphs(executor)))
    assert found[0] == found[1]
    assert not graphs(executor)._refused


def test_all_graphs_are_captured_while_nobody_asks_and_then_there_is_nothing_left(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    executor = executor_of(tmp_path)
    Driver(executor).run([Part(0, 0, prompt(0, 20))], loads=[load_row(0)])
    rests = 0
    while executor.rest():
        rests += 1
        assert rests < 200
    assert len(graphs(executor)) >= rests > 30
    assert not graphs(executor)._refused
    assert executor.rest() is False
