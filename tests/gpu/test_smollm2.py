"""SmolLM2-135M's real weights on the GPU: `SGLITE_TEST_SMOLLM2=FOLDER pytest -m gpu tests/gpu/test_smollm2.py`.

In float32 the text is the CPU's; in bfloat16 and float16 each chosen token's float32 logit, by transformers, is within
0.25 of the largest. A first difference counts unless the two best tokens there are within 1e-4, where rounding may
decide.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
import transformers

from sglite.protocol import RequestOutput
from sglite.runtime.async_engine import Engine
from tests.gpu.models import behind

FOLDER = os.environ.get("SGLITE_TEST_SMOLLM2", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not FOLDER, reason="SGLITE_TEST_SMOLLM2 names no folder with the model"),
]

STORY = (
    "The following notes are about a small harbour town in the north. It has a lighthouse, two bakeries, a school "
    "with forty children and a ferry that leaves at six every morning. In winter the ferry does not run. "
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8,",
    "Once upon a time there was a fox who",
    "Ein kurzer Satz auf Deutsch:",
    STORY + "In the morning the children",
    STORY + "The ferry",
    STORY * 16 + "The baker said that",  # more than a small step
]
TOKENS = 32
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}


def run(device: str, dtype: str) -> list[RequestOutput]:
    # A fixed size: engines of other tests start and end on the same GPU.
    with Engine(model=FOLDER, device=device, dtype=dtype, kv_memory=1.0, check_invariants=True) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert engine.stats()["accounting_problems"] == 0
    return outputs


def test_float32_gives_the_text_of_the_cpu() -> None:
    for want, got in zip(run("cpu", "float32"), run("cuda", "float32"), strict=True):
        different = [i for i in range(TOKENS) if want.token_ids[i] != got.token_ids[i]]
        if different:
            (_, first), (_, second) = want.logprobs[different[0]].top[:2]
            assert first - second < 1e-4, f"differs at token {different[0]}: {want.text!r} and {got.text!r}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_chooses_tokens_that_float32_ranks_first(dtype: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval().cuda()
    for output in run("cuda", dtype):
        prompt: Sequence[int] = output.prompt_token_ids
        assert behind(model, prompt, output.token_ids, model.config.vocab_size) < 0.25


def test_a_server_answers_many_at_once_from_an_engine_process() -> None:
    command = [sys.executable, "-m", "sglite", "serve", "--model", FOLDER, "--device", "cuda", "--port", "0"]
    command += ["--kv-memory", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
            answers = asyncio.run(ask(url, [f"{i} and {i} are" for i in range(32)]))
        finally:
            server.terminate()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [64] * 32
    assert server.returncode == 0


async def ask(url: str, prompts: list[str]) -> list[dict[str, Any]]:
    body = {"model": "any", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        asked = [client.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]
        return [response.json() for response in await asyncio.gather(*asked)]
