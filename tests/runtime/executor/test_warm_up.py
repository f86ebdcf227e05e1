from __future__ import annotations

from pathlib import Path

import pytest

from sglite.runtime.executor.model_runner import ModelRunner
from sglite.runtime.executor.sampler import plan_draws
from sglite.runtime.executor.warm_up import kinds_of_draws, warm_up
from tests.fakes.batches import generate
from tests.fakes.tiny_models import tiny_executor, tiny_reference

PROMPTS = [[5, 9, 200, 31], [7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm-up")
    tiny_reference("llama").save_pretrained(path)
    return path


def warmed(executor: ModelRunner) -> ModelRunner:
    executor.overlaps = True  # as a GPU would
    warm_up(executor, max_model_len=256)
    return executor


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_up_leaves_nothing_behind(folder: Path, page_size: int) -> None:
    want = generate(tiny_executor(folder, page_size=page_size), PROMPTS, 5)
    assert generate(warmed(tiny_executor(folder, page_size=page_size)), PROMPTS, 5) == want


def test_a_device_with_nothing_to_load_runs_nothing(folder: Path) -> None:
    executor = tiny_executor(folder)
    warm_up(executor, max_model_len=256)
    assert not executor._tables.host_page_table.any()


def test_too_small_a_cache_is_left_alone(folder: Path) -> None:
    warmed(tiny_executor(folder, num_pages=8))


def test_the_kinds_of_draws_are_all_that_requests_may_ask_for(folder: Path) -> None:
    executor = tiny_executor(folder)
    executor.overlaps = True
    found = set()
    for batch in kinds_of_draws(executor, max_model_len=256):
        executor._sampling.load(batch.loads)
        flags = plan_draws(batch, executor._sampling).flags
        found.add((len(batch.rows), flags.masked, flags.random, flags.filtered, flags.penalized, flags.drafts))
        assert flags.penalized == flags.biased
    assert len(found) == 2 * 2 * 3 * 2 * 2
    assert {rows for rows, *_ in found} == {1, executor.max_rows}


def test_a_device_that_compiles_nothing_is_asked_for_nothing(folder: Path) -> None:
    assert kinds_of_draws(tiny_executor(folder), max_model_len=256) == []
