"""The models against transformers: the same numbers in float32, whatever the architecture and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sglite.runtime.executor.model_runner import ModelRunner
from tests.fakes.batches import Driver, Part, generate, load_row
from tests.fakes.tiny_models import TINY, tiny_executor, tiny_reference

Pair = tuple[transformers.PreTrainedModel, ModelRunner]


@pytest.fixture(scope="module", params=sorted(TINY))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = tiny_reference(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, tiny_executor(folder)


def sequence(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def score(executor: ModelRunner, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """Logprobs of ids[1:], computed in chunks of the given sizes."""
    driver = Driver(executor)
    found, start = [], 0
    for i, size in enumerate(chunks):
        targets = list(ids[start + 1 : start + size + 1])
        part = Part(0, start, ids[start : start + size], num_logits=size, samples=False, targets=targets)
        part.target_positions = list(range(len(targets)))
        result = driver.run([part], loads=[load_row(0)] if i == 0 else [])
        found.append(result.chosen_logprobs[0])
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize("chunks", [[100], [1, 7, 32, 60], [50] + [1] * 50])
def test_logprobs_equal_the_reference(pair: Pair, chunks: list[int]) -> None:
    reference, executor = pair
    ids = sequence(1, 100)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = expected[torch.arange(99), torch.tensor(ids[1:])].numpy()
    np.testing.assert_allclose(score(executor, ids, chunks), expected, atol=2e-4)


def test_greedy_text_equals_the_reference_for_a_ragged_batch(pair: Pair) -> None:
    reference, executor = pair
    prompts = [sequence(i, n) for i, n in enumerate((1, 17, 40))]
    for prompt, output in zip(prompts, generate(executor, prompts, 24), strict=True):
        assert_greedy(reference, prompt, output)


def test_chunks_and_batch_mates_do_not_change_greedy_text(pair: Pair) -> None:
    _, executor = pair
    prompts = [sequence(i, n) for i, n in enumerate((5, 33, 60))]
    together = generate(executor, prompts, 20)
    assert together == generate(executor, prompts, 20, chunk=8)
    assert together == [generate(executor, [prompt], 20)[0] for prompt in prompts]


def assert_greedy(reference: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Every token is the reference's best, or lies within 1e-4 of it."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert (logits.max(-1).values - chosen).max() < 1e-4


def test_the_padded_tail_of_the_vocabulary_is_never_drawn(tmp_path: Path) -> None:
    reference = tiny_reference("llama-untied")
    with torch.no_grad():
        reference.lm_head.weight[300:] = reference.lm_head.weight[:20] * 5  # the largest logits
    reference.save_pretrained(tmp_path)
    outputs = generate(tiny_executor(tmp_path, vocab_size=300), [sequence(3, 12)], 30)
    assert max(outputs[0]) < 300


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_cpu(tmp_path: Path, dtype: str) -> None:
    reference = tiny_reference("qwen3")
    reference.save_pretrained(tmp_path)
    executor = tiny_executor(tmp_path, dtype=dtype)
    ids = sequence(5, 40)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = expected[torch.arange(39), torch.tensor(ids[1:])].numpy()
    assert np.abs(score(executor, ids, [10, 30]) - expected).mean() < 0.3


def test_int8_weights_stay_near_the_reference_and_ignore_batch_mates(tmp_path: Path) -> None:
    reference = tiny_reference("qwen2")
    reference.save_pretrained(tmp_path)
    executor = tiny_executor(tmp_path, dtype="int8")
    ids = sequence(5, 40)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = expected[torch.arange(39), torch.tensor(ids[1:])].numpy()
    assert np.abs(score(executor, ids, [10, 30]) - expected).mean() < 0.3
    prompts = [ids[:7], ids[10:30]]
    assert generate(executor, prompts, 10)[0] == generate(executor, prompts[:1], 10)[0]
