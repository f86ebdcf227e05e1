"""Steps that read a shared prefix once, in the executor and in the engine: the same as the plain path gives, within the
numerics of the type, while rows come, finish and bring several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglite.runtime.device.cuda.tree_plan import Costs
from sglite.runtime.executor.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.batches import Driver, Part, load_row
from tests.fakes.tiny_models import tiny_executor
from tests.fakes.tokenizer import ByteTokenizer
from tests.gpu.models import behind, save_tiny
from tests.runtime.harness import Harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = ByteTokenizer.vocab_size
ALWAYS = Costs(launches=-1e9)
TYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_SIZES", tiny_models._SIZES | {"max_position_embeddings": 1024})
        return folder, save_tiny(request.param, folder)


def executor(folder: Path, *, device: str, dtype: str) -> ModelRunner:
    return tiny_executor(folder, device=device, dtype=dtype, num_pages=6000, max_rows=16, vocab_size=VOCAB)


def tree_steps(runner: ModelRunner) -> int:
    return sum(key.tree is not None for key in runner._forward._seen)  # type: ignore[attr-defined]


def forced(runner: ModelRunner, *, shared: bool) -> Iterator[np.ndarray]:
    """Logprobs of given tokens: rows 1 .. 8 begin with the 500 tokens of row 0, row 9 has some of its own."""
    rng = np.random.default_rng(5)
    driver, prefix = Driver(runner), 500

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    driver.run([Part(0, 0, tokens(prefix), num_logits=0, samples=False)], loads=[load_row(0)])
    forks = list(range(1, 9))
    for row in forks:
        driver.share(0, row, prefix)
    lengths = dict.fromkeys(forks, prefix) | {9: 0}
    for step in range(9):
        if step == 6:
            del lengths[3]  # another plan with the same key
        several = 3 if step == 7 else 1
        counts = {row: several if row % 2 else 1 for row in lengths}
        if step == 0:
            counts = {row: 2 + row for row in lengths}
        parts = [
            Part(row, lengths[row], tokens(n), num_logits=1, samples=False, targets=tokens(1))
            for row, n in counts.items()
        ]
        members = tuple(i for i, row in enumerate(lengths) if row in forks)
        result = driver.run(
            parts,
            loads=[load_row(row) for row in lengths] if step == 0 else [],
            shared=((prefix, members),) if shared else (),
        )
        assert not result.errors
        yield np.array([result.chosen_logprobs[i][0] for i in range(len(parts))])
        for row, n in counts.items():
            lengths[row] += n


@TYPES
def test_teacher_forced_logprobs_are_those_of_the_plain_path(saved: tuple[Path, Any], dtype: str) -> None:
    folder, _ = saved
    truth = list(forced(executor(folder, device="cpu", dtype="float32"), shared=False))
    plain = list(forced(executor(folder, device="cuda", dtype=dtype), shared=False))
    runner = executor(folder, device="cuda", dtype=dtype)
    runner._attention.tree.costs = ALWAYS  # type: ignore[attr-defined]
    tree = list(forced(runner, shared=True))
    assert tree_steps(runner) >= 3
    for want, one, other in zip(truth, plain, tree, strict=True):
        np.testing.assert_allclose(other, want, atol=0.3)
        assert np.abs(other - want).mean() < 2 * np.abs(one - want).mean() + 0.01


@TYPES
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_forks_decode_over_one_reading_of_their_prefix(saved: tuple[Path, Any], dtype: str, overlap: bool) -> None:
    folder, model = saved
    runner = executor(folder, device="cuda", dtype=dtype)
    runner._attention.tree.costs = ALWAYS  # type: ignore[attr-defined]
    harness = Harness(executor=runner, max_model_len=1024, overlap=overlap)
    rng = np.random.default_rng(1)
    trunk = rng.integers(97, 123, 600).tolist()
    other = rng.integers(97, 123, 300).tolist()
    harness.generate(trunk, max_tokens=1, ignore_eos=True)
    prompts = [trunk + [65 + i] * (1 + i) for i in range(6)] + [other + [65 + i] for i in range(3)] + [[70, 71]]
    asked = {harness.add(prompt, max_tokens=10 + 3 * i, ignore_eos=True): prompt for i, prompt in enumerate(prompts)}
    asked[harness.add(trunk, n=3, max_tokens=25, ignore_eos=True)] = trunk
    harness.run()
    assert tree_steps(runner) > 0
    for request_id, prompt in asked.items():
        assert behind(model, prompt, list(harness.output(request_id).token_ids), VOCAB) < 0.25
