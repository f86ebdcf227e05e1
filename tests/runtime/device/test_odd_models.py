"""Models of odd shapes give the same numbers over the compiled kernels and over torch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from sglite.runtime.batch import StepResult
from sglite.runtime.config import EngineConfig
from sglite.runtime.device import cpu
from sglite.runtime.executor.build import build_executor
from sglite.runtime.models import loader
from sglite.runtime.models.sources import resolve_model
from tests.fakes.batches import Driver, Part, load_row

ROWS = 6
Steps = list[list[tuple[int, int, list[int]]]]  # (row, start, tokens) of each row in each step


def odd_config(rng: random.Random) -> dict[str, object]:
    kv_heads, family = rng.choice([1, 2, 3]), rng.choice(["Llama", "Qwen2", "Qwen3"])
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "num_attention_heads": kv_heads * rng.randint(1, 8),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([2, 6, 12, 64, 80, 128]),
        "vocab_size": rng.choice([17, 33, 100, 1001]),
        "hidden_size": rng.choice([8, 24, 60, 100]),
        "intermediate_size": rng.choice([5, 16, 33, 96]),
        "num_hidden_layers": 2,
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": family == "Llama" and rng.random() < 0.3,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
    }


def odd_steps(rng: random.Random, vocab: int) -> Steps:
    """Prompts, pieces of prompts, forced runs and single tokens beside each other."""
    lengths, steps = [0] * ROWS, list[list[tuple[int, int, list[int]]]]()
    for _ in range(5):
        step: list[tuple[int, int, list[int]]] = []
        for row in rng.sample(range(ROWS), rng.randint(1, ROWS)):
            tokens = [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 2, 5, 6, 7, 13, 40, 77]))]
            step.append((row, lengths[row], tokens))
            lengths[row] += len(tokens)
        steps.append(step)
    return steps


def run(folder: Path, steps: Steps, *, vocab: int, threads: int, page_size: int) -> list[StepResult]:
    config = EngineConfig(
        model=str(folder), device="cpu", load_format="dummy", num_threads=threads, page_size=page_size, max_rows=8,
        num_pages=2000,
    )  # fmt: skip
    driver = Driver(build_executor(config, resolve_model(folder, load_format="dummy"), vocab_size=vocab))
    results, begun = [], set[int]()
    for step in steps:
        loads = [load_row(row, prompt=tokens) for row, _, tokens in step if row not in begun]
        begun |= {row for row, _, _ in step}
        parts = [Part(row, start, tokens, wants_logprobs=True, targets=[5]) for row, start, tokens in step]
        results.append(driver.run(parts, loads=loads))
    return results


@pytest.mark.parametrize("seed", range(8))
def test_the_compiled_kernels_give_what_torch_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(loader, "DUMMY_STD", 0.3)  # wide enough that the logits differ clearly
    rng = random.Random(seed)
    config = odd_config(rng)
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocab = int(str(config["vocab_size"]))
    steps, threads, page_size = odd_steps(rng, vocab), rng.choice([1, 2, 3]), rng.choice([1, 4, 16])
    compiled = run(tmp_path, steps, vocab=vocab, threads=threads, page_size=page_size)
    monkeypatch.setattr(cpu, "load_kernels", lambda threads: None)
    plain = run(tmp_path, steps, vocab=vocab, threads=threads, page_size=page_size)
    for a, b in zip(compiled, plain, strict=True):
        assert a.errors == b.errors == {}
        assert a.chosen_logprobs.keys() == b.chosen_logprobs.keys() != set()
        for row, found in a.chosen_logprobs.items():
            np.testing.assert_allclose(found, b.chosen_logprobs[row], atol=1e-3, rtol=1e-3)
    assert np.ptp([logprobs[0] for result in plain for logprobs in result.chosen_logprobs.values()]) > 1.0
