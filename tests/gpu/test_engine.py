"""The engine on a GPU with tiny random models: the same requests as on the CPU, under every kind of pressure.

float32 goes through the torch reference attention and gives the CPU's text. bfloat16 and float16 go through the kernels
and are tested by teacher forcing: each chosen token's float32 logit on the CPU is within 0.25 of the largest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglite.protocol import FinishReason, ProgramRef, RequestOutput
from tests.fakes.tiny_models import tiny_executor
from tests.fakes.tokenizer import ByteTokenizer
from tests.gpu.models import behind, save_tiny
from tests.runtime.harness import Harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = ByteTokenizer.vocab_size
CLOSE = 0.25
BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
TYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_tiny("qwen3", folder)


def engine(folder: Path, dtype: str, *, device: str = "cuda", num_pages: int = 600, **options: Any) -> Harness:
    """Eight rows; every promise about pages is checked after each step."""
    executor = tiny_executor(folder, device=device, dtype=dtype, num_pages=num_pages, vocab_size=VOCAB)
    return Harness(executor=executor, max_model_len=256, **options)


class Judge:
    """Whether answers are right: equal to what the CPU says alone, or by teacher forcing."""

    def __init__(self, saved: tuple[Path, Any], dtype: str) -> None:
        self._folder, self._model = saved
        self._exact = dtype == "float32"
        self._alone: Harness | None = None

    def check(self, prompt: Sequence[int], output: RequestOutput) -> None:
        ids = list(output.token_ids)
        if not self._exact:
            assert behind(self._model, prompt, ids, VOCAB) < CLOSE
            return
        if self._alone is None:
            self._alone = engine(self._folder, "float32", device="cpu", prefix_cache=False)
        if ids:
            alone = self._alone.generate(list(prompt), max_tokens=len(ids), ignore_eos=True)
            assert ids == list(alone.token_ids)


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts that share prefixes in all the ways a tree can be cut."""
    base = list(rng.choice((b"the quick brown fox jumps over ", b"the quick red fox ", b"once upon a time ", b"q")))
    return base[: rng.randint(1, len(base))] + [rng.choice(b"ab") for _ in range(rng.randint(0, 60))]


@TYPES
@BOTH_LOOPS
def test_a_random_trace_under_pressure_is_answered_right(saved: tuple[Path, Any], dtype: str, overlap: bool) -> None:
    rng = random.Random(3)
    harness = engine(saved[0], dtype, num_pages=300, overlap=overlap, max_step_tokens=64)
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    while len(asked) < 40:
        for _ in range(rng.randrange(4)):
            prompt, n = random_prompt(rng), rng.choice((1, 1, 1, 3))
            fields: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 17, 60)), "ignore_eos": True}
            if rng.random() < 0.3:
                name = f"p{rng.randrange(4)}"
                fields["program"] = ProgramRef(program_id=name, remaining=rng.randrange(3), wanted_again=-1)
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
    metrics, judge = harness.core.metrics, Judge(saved, dtype)
    assert metrics.retractions > 0 and metrics.evicted_pages > 0 and metrics.cached_tokens > 0
    assert metrics.pages_owned == metrics.pages_protected == 0
    for request_id, (prompt, n) in asked.items():
        for index in range(n):
            output = harness.output(request_id, index)
            assert output.finish_reason is FinishReason.LENGTH or request_id in aborted
            judge.check(prompt, output)


@TYPES
@BOTH_LOOPS
def test_retracted_rows_come_back_to_the_same_text(saved: tuple[Path, Any], dtype: str, overlap: bool) -> None:
    harness = engine(saved[0], dtype, num_pages=128, overlap=overlap)
    prompts = [list(f"{i} long stream".encode()) for i in range(3)]
    ids = [harness.add(prompt, max_tokens=70, ignore_eos=True) for prompt in prompts]
    harness.run()
    assert harness.core.metrics.retractions > 0
    judge = Judge(saved, dtype)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert len(harness.output(request_id).token_ids) == 70
        judge.check(prompt, harness.output(request_id))


@TYPES
def test_an_abort_stops_one_row_and_no_other(saved: tuple[Path, Any], dtype: str) -> None:
    harness = engine(saved[0], dtype, overlap=True)
    prompts = [list(f"{i} of several".encode()) for i in range(4)]
    ids = [harness.add(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
    for _ in range(8):
        harness.step()
    harness.core.abort(ids[1])
    harness.run()
    judge = Judge(saved, dtype)
    for i, request_id in enumerate(ids):
        output = harness.output(request_id)
        assert output.finish_reason is (FinishReason.ABORT if i == 1 else FinishReason.LENGTH)
        assert len(output.token_ids) == 30 or i == 1
        judge.check(prompts[i], output)
    assert harness.core.metrics.pages_owned == harness.core.metrics.pages_protected == 0


@TYPES
def test_forks_share_their_prompt_and_give_its_text(saved: tuple[Path, Any], dtype: str) -> None:
    harness = engine(saved[0], dtype, overlap=True)
    prompt = list(b"a common beginning of some length, read by all of them. " * 3)
    forks = [[*prompt, *f"branch {i}".encode()] for i in range(6)]
    first = harness.add(prompt, max_tokens=4, ignore_eos=True)
    harness.run()
    ids = [harness.add(fork, max_tokens=20, ignore_eos=True) for fork in forks]
    harness.run()
    judge = Judge(saved, dtype)
    judge.check(prompt, harness.output(first))
    for fork, request_id in zip(forks, ids, strict=True):
        assert harness.output(request_id).usage.cached_tokens >= len(prompt)
        judge.check(fork, harness.output(request_id))


@TYPES
def test_chunked_and_cached_prompts_give_the_same_as_whole_ones(saved: tuple[Path, Any], dtype: str) -> None:
    prompt = list(b"the same prompt, first in one piece, then in several, then from the cache. " * 3)[:200]
    judge = Judge(saved, dtype)
    for options in ({}, {"max_step_tokens": 48}, {"overlap": True, "max_step_tokens": 64}):
        harness = engine(saved[0], dtype, **options)
        for _ in range(2):
            judge.check(prompt, harness.generate(prompt, max_tokens=20, ignore_eos=True))
        assert harness.core.metrics.cached_tokens >= len(prompt) - 1
