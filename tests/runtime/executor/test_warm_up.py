from __future__ import annotations

from pathlib import Path

import pytest

from sglite.runtime.executor.model_runner import ModelRunner
from sglite.runtime.executor.warm_up import warm_up
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
