"""A boundary that is verified in the prompt's own step, on a GPU: `SGLITE_TEST_SMOLLM2=FOLDER pytest -m gpu
tests/gpu/test_heal_drafts.py`. The text is the one of a step for the boundary alone."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch

from sglite.protocol import GenerateRequest, RequestOutput, SamplingParams, merge_outputs
from sglite.runtime.async_engine import Engine
from sglite.runtime.scheduler.heals import Heals

FOLDER = os.environ.get("SGLITE_TEST_SMOLLM2", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not FOLDER, reason="SGLITE_TEST_SMOLLM2 names no folder with the model"),
]

PROMPTS = (
    "The capital of France is",
    "The site is http",  # goes on as "://" or "s://", which are tokens with it
    "def fibonacci(n",
    "Question: Who wrote it?\nAnswer:",
    "1, 2, 3, 5, ",  # a blank belongs to the next word
    "It is eas",
)


async def answer(engine: Engine, prompt: str, tokens: int) -> RequestOutput:
    request = GenerateRequest(
        request_id=engine.new_request_id(),
        prompt=tuple(engine.tokenizer.encode(prompt)),
        sampling_params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        heal=True,
    )
    return merge_outputs([output async for output in engine.stream_request(request)])


async def answers(engine: Engine) -> list[RequestOutput]:
    return list(await asyncio.gather(*(answer(engine, p, n) for p in PROMPTS for n in (1, 2, 12))))


def test_the_text_is_the_same_and_boundaries_that_are_spelled_again_cost_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine(model=FOLDER, device="auto", dtype="float32", kv_memory=1.0) as engine:
        drafted = asyncio.run(answers(engine))
        monkeypatch.setattr(Heals, "drafts", lambda self, request: False)
        asyncio.run(engine.flush_cache())
        apart = asyncio.run(answers(engine))
    for one, two in zip(drafted, apart, strict=True):
        assert one.token_ids == two.token_ids
        assert one.text == two.text
    assert sum(output.usage.accepted_draft_tokens for output in drafted) > 1
    assert not any(output.usage.draft_tokens for output in apart)
