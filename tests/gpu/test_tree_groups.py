"""Groups of rows with a shared prefix in every state they can be in: nested, named twice, at the bounds of tiles,
dissolving as rows end, are aborted or retracted, with their pages given to others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglite.protocol import FinishReason, ProgramRef
from sglite.runtime.device.cuda.tree_plan import Costs
from sglite.runtime.executor.model_runner import ModelRunner
from tests.fakes.batches import Driver, Part, load_row
from tests.fakes.tiny_models import tiny_executor
from tests.fakes.tokenizer import ByteTokenizer
from tests.gpu.models import behind, save_tiny
from tests.runtime.harness import Harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = ByteTokenizer.vocab_size
ALWAYS = Costs(launches=-1e9)
SharedGroups = tuple[tuple[int, tuple[int, ...]], ...]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_tiny("qwen3", folder)


@pytest.fixture(autouse=True)
def _short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglite.runtime.scheduler.scheduler._MIN_SHARED_TOKENS", 3)
    monkeypatch.setattr("sglite.runtime.device.cuda.tree_plan._SMALLEST_CHUNK", 1)


def executor(folder: Path, *, num_pages: int, page_size: int = 1) -> ModelRunner:
    runner = tiny_executor(
        folder, device="cuda", dtype="bfloat16", num_pages=num_pages, page_size=page_size, max_rows=16, vocab_size=VOCAB
    )
    runner._attention.tree.costs = ALWAYS  # type: ignore[attr-defined]
    return runner


def tree_steps(runner: ModelRunner) -> int:
    return sum(key.tree is not None for key in runner._forward._seen)  # type: ignore[attr-defined]


def scores(runner: ModelRunner, lengths: Sequence[int], steps: Sequence[tuple[SharedGroups, Sequence[int]]]) -> Any:
    """Logprobs of given tokens. Row 0 has a trunk; row i begins with its first lengths[i] tokens and has 3 of its own.
    Then come `steps`: the groups, as rows, and the new tokens of each row (0: it sits the step out)."""
    rng, driver = np.random.default_rng(5), Driver(runner)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    driver.run([Part(0, 0, tokens(max(lengths)), num_logits=0, samples=False)], loads=[load_row(0)])
    for row, length in enumerate(lengths):
        if row:
            driver.share(0, row, length)
    at = list(lengths)
    driver.run(
        [Part(row, at[row], tokens(3), num_logits=0, samples=False) for row in range(len(lengths))],
        loads=[load_row(row) for row in range(1, len(lengths))],
    )
    at = [length + 3 for length in at]
    found = []
    for groups, counts in steps:
        here = [row for row, count in enumerate(counts) if count]
        parts = [
            Part(row, at[row], tokens(counts[row]), num_logits=1, samples=False, targets=tokens(1)) for row in here
        ]
        shared = tuple((length, tuple(here.index(row) for row in rows)) for length, rows in groups)
        result = driver.run(parts, shared=shared)
        assert not result.errors
        found.append([float(result.chosen_logprobs[i][0]) for i in range(len(parts))])
        at = [start + count for start, count in zip(at, counts, strict=True)]
    return found


CASES: dict[str, tuple[list[int], list[tuple[SharedGroups, list[int]]]]] = {
    "at the bounds of tiles": (
        [192, 64, 64, 128, 128, 65, 65],
        [
            (((64, (1, 2)), (128, (3, 4)), (65, (5, 6))), [1] * 7),
            (((63, (1, 2)), (127, (3, 4)), (1, (0, 5, 6))), [1] * 7),
            (((64, (0, 1, 2, 3, 4, 5, 6)),), [1] * 7),
        ],
    ),
    "one after the other for the same rows": (
        [150] * 6,
        [(((n, (0, 1, 2)), (150 - n, (3, 4, 5))), [1] * 6) for n in (20, 21, 20, 149, 64, 64, 1)],
    ),
    "nested, the inner one named": (
        [180, 180, 180, 90, 90],
        [(((180, (0, 1, 2)),), [1] * 5), (((90, (0, 1, 2, 3, 4)),), [1] * 5), (((180, (0, 2)), (90, (3, 4))), [1] * 5)],
    ),
    "a row named twice": (
        [100] * 4,
        [(((100, (0, 1, 2)), (50, (2, 3))), [1] * 4), (((50, (0, 1)), (100, (1, 0))), [1] * 4)],
    ),
    "nobody, one, and no prefix": ([100] * 3, [(((100, ()), (100, (1,)), (0, (0, 2))), [1] * 3), ((), [1] * 3)]),
    "rows that sit out and come back": (
        [140] * 5,
        [
            (((140, (0, 1, 2, 3, 4)),), [1] * 5),
            (((140, (0, 2, 4)),), [1, 0, 1, 0, 1]),
            (((140, (1, 3)),), [0, 1, 0, 1, 0]),
            (((140, (0, 1, 2, 3, 4)),), [1] * 5),
            (((140, (0, 1, 2, 3, 4)),), [1, 3, 1, 2, 5]),
            (((140, (0, 1, 2, 3, 4)),), [1, 3, 1, 2, 5]),
            (((140, (0, 1, 2, 3, 4)),), [1] * 5),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_groups_give_what_rows_give_by_themselves(saved: tuple[Path, Any], case: str) -> None:
    lengths, steps = CASES[case]
    want = scores(executor(saved[0], num_pages=1000), lengths, [((), counts) for _, counts in steps])
    runner = executor(saved[0], num_pages=1000)
    got = scores(runner, lengths, steps)
    assert tree_steps(runner) > 0 or case.startswith("nobody")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


def test_a_row_of_another_group_takes_the_place_of_one_that_ended(saved: tuple[Path, Any]) -> None:
    """The same groups of the same rows by their numbers, but not by their pages: no plan may know pages."""
    runner, model = executor(saved[0], num_pages=900), saved[1]
    harness = Harness(executor=runner, max_model_len=256)
    rng = np.random.default_rng(2)
    for _ in range(3):
        trunk = rng.integers(97, 123, 150).tolist()
        prompts = [trunk + [65 + i] for i in range(4)]
        ids = [harness.add(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
        harness.run()
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert behind(model, prompt, list(harness.output(request_id).token_ids), VOCAB) < 0.25
    assert tree_steps(runner) > 0


def random_prompt(rng: random.Random) -> list[int]:
    """Forks, and forks of forks, of a few trunks."""
    trunk = list(rng.choice((b"the quick brown fox jumps over the lazy dog, and ", b"once upon a time ")) * 4)
    branch = [rng.choice(b"xyz")] * rng.choice((0, 15, 16, 17))
    twig = [rng.choice(b"mn")] * rng.choice((0, 7, 30))
    return trunk[: rng.choice((30, 64, 128))] + branch + twig + [rng.choice(b"ab")] * rng.randint(0, 5)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_random_trace_of_forks_under_pressure(saved: tuple[Path, Any], overlap: bool, page_size: int) -> None:
    folder, model = saved
    rng = random.Random(7 + page_size)
    runner = executor(folder, num_pages=280 // page_size, page_size=page_size)
    harness = Harness(executor=runner, max_model_len=256, overlap=overlap, page_size=page_size, max_step_tokens=200)
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    while len(asked) < 30:
        for _ in range(rng.randrange(5)):
            prompt, n = random_prompt(rng), rng.choice((1, 1, 3))
            fields: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 20, 60)), "ignore_eos": True}
            if rng.random() < 0.4:
                fields["program"] = ProgramRef(
                    program_id=f"p{rng.randrange(3)}", remaining=rng.randrange(3), wanted_again=rng.choice((0, -1, 64))
                )
            asked[harness.add(prompt, n=n, **fields)] = prompt, n
        for _ in range(rng.randrange(6)):
            harness.step()
        if asked and rng.random() < 0.2:
            request_id = rng.choice(list(asked))
            harness.core.abort(request_id)
            aborted.add(request_id)
        if rng.random() < 0.05:
            harness.core.flush_cache()
    harness.run()
    metrics = harness.core.metrics
    assert tree_steps(runner) > 0 and metrics.retractions > 0 and metrics.evicted_pages > 0
    assert metrics.pages_owned == metrics.pages_protected == 0
    for request_id, (prompt, n) in asked.items():
        for index in range(n):
            output = harness.output(request_id, index)
            assert output.finish_reason is FinishReason.LENGTH or request_id in aborted
            assert behind(model, prompt, list(output.token_ids), VOCAB) < 0.25
