"""Tiny models with heads of 64, for which there are kernels, and how far their tokens are from the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from tests.fakes import tiny_models
from tests.fakes.tiny_models import TINY, tiny_reference


def save_tiny(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Made by transformers, in float32, and saved to `folder`."""
    # Wider weights make scores so large that bfloat16 itself, also that of transformers, is up to 0.9 behind.
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_SIZES", tiny_models._SIZES | sizes)
        patch.setitem(TINY, name, (TINY[name][0], TINY[name][1] | {"head_dim": 64}))
        model = tiny_reference(name)
    model.save_pretrained(folder)
    return model


def behind(model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> float:
    """By how much a chosen token's logit is behind the largest of the first `vocab_size`, at most (float32)."""
    if not output:
        return 0.0
    ids = torch.tensor([*prompt, *output], device=model.device)
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :vocab_size]
    return float((logits.amax(-1) - logits.gather(1, ids[len(prompt) :, None])[:, 0]).max())
