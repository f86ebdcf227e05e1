"""The real small model against transformers in float32: 20 prompts, 64 greedy tokens each."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sglite.runtime.config import EngineConfig
from sglite.runtime.executor.build import build_executor
from sglite.runtime.models.loader import resolve_model
from tests.fakes.batches import generate

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fib(n):",
    "To make pancakes you need",
    "The three laws of motion are",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The largest planet of the solar system",
    "SELECT name FROM",
    "In the beginning",
    "Water boils at",
    "The mitochondria is",
    '{"name": "Ada", "age":',
    "Roses are red,",
    "My favourite book is",
    "<html><head>",
    "The difference between a cat and a dog",
    "How do I learn to swim?",
    "import numpy as np\n",
    "A haiku about rain:",
)
TOKENS = 64


@pytest.mark.model
@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers() -> None:
    """A first difference counts unless the two logits lie within 1e-4 (what comes behind it is another text)."""
    source = resolve_model("smollm2")
    tokenizer = Tokenizer.from_file(str(source.tokenizer_folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    config = EngineConfig(device="cpu", max_rows=len(PROMPTS))
    outputs = generate(build_executor(config, source, vocab_size=tokenizer.get_vocab_size()), prompts, TOKENS)
    reference = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(TOKENS), torch.tensor(output)]
        assert (logits.max(-1).values - chosen).max() < 1e-4
