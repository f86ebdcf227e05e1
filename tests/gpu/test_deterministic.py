"""deterministic=True in bfloat16 and float16: a request's greedy tokens are the same in any company and by any way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sglite.errors import InvalidRequest
from sglite.runtime.device.cuda.inputs import GraphKey
from tests.fakes.tiny_models import tiny_executor
from tests.fakes.tokenizer import ByteTokenizer
from tests.gpu.models import behind, save_tiny
from tests.runtime.harness import Harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = ByteTokenizer.vocab_size
TOKENS = 32
ALONE = 8  # of the 37 prompts: those that are also answered alone
KINDS = pytest.mark.parametrize(
    ("model", "dtype"), [("qwen3", "bfloat16"), ("qwen2", "bfloat16"), ("llama", "float16")]
)


@pytest.fixture
def saved(model: str, tmp_path: Path) -> tuple[Path, Any]:
    return tmp_path, save_tiny(model, tmp_path)


def engine(folder: Path, dtype: str, *, num_pages: int, **options: Any) -> Harness:
    executor = tiny_executor(
        folder, device="cuda", dtype=dtype, num_pages=num_pages, max_rows=64, vocab_size=VOCAB, deterministic=True
    )
    return Harness(executor=executor, max_model_len=256, **({"overlap": True} | options))


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(draw.choice((3, 20, 70, 190)))] for _ in range(37)]


def answer(harness: Harness, prompt: list[int]) -> list[int]:
    return list(harness.generate(prompt, max_tokens=TOKENS, ignore_eos=True).token_ids)


@KINDS
def test_alone_in_a_batch_cached_chunked_and_retracted_give_the_same(saved: tuple[Path, Any], dtype: str) -> None:
    folder, model = saved
    asked = prompts()
    single = engine(folder, dtype, num_pages=300, prefix_cache=False)
    want = [answer(single, prompt) for prompt in asked[:ALONE]]
    for prompt, tokens in zip(asked, want, strict=False):
        assert behind(model, prompt, tokens, VOCAB) < 0.25
    ways: dict[str, dict[str, Any]] = {
        "in one batch": {"max_step_tokens": 8192},
        "chunked": {"max_step_tokens": 64},
        "retracted": {"num_pages": 1000},
        "plain loop": {"overlap": False, "max_step_tokens": 300},
    }
    for name, options in ways.items():
        harness = engine(folder, dtype, **({"num_pages": 5000} | options))
        for turn in ("new", "cached"):
            ids = [harness.add(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in asked]
            harness.run()
            for request_id, prompt, tokens in zip(ids, asked, want, strict=False):
                assert list(harness.output(request_id).token_ids) == tokens, (name, turn, len(prompt))
        assert harness.core.metrics.cached_tokens > 0
        assert harness.core.metrics.retractions > 0 or name != "retracted"


@KINDS
def test_a_cached_answer_is_read_like_a_prompt(saved: tuple[Path, Any], dtype: str) -> None:
    """What a decode step wrote to the cache is what a prompt's step would have written."""
    folder, _ = saved
    prompt = prompts()[1]
    warm, cold = (engine(folder, dtype, num_pages=300, prefix_cache=cache) for cache in (True, False))
    longer = [*prompt, *answer(warm, prompt), 7, 8, 9]
    assert answer(warm, longer) == answer(cold, longer)
    assert warm.core.metrics.cached_tokens > len(prompt)


def test_a_graph_captured_behind_a_large_step_reads_nothing_of_it(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    harness = engine(tmp_path, "bfloat16", num_pages=3000, max_step_tokens=2048)
    ids = [harness.add(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts()]
    harness.step()
    assert harness.executor._forward._seen == set(), "all prompts came in one large step"
    device = harness.executor._device
    device._capture_ahead(GraphKey(4, 4, decode=False, splits=1))
    torch.cuda.synchronize()
    harness.run()
    assert {len(harness.output(request_id).token_ids) for request_id in ids} == {3}


def test_what_has_no_such_kernels_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(InvalidRequest, match="deterministic"):
        engine(tmp_path, "float32", num_pages=10)
