"""Tiny models with random weights, one of each architecture, as transformers makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from sglite.runtime.config import EngineConfig
from sglite.runtime.executor.build import build_executor
from sglite.runtime.executor.model_runner import ModelRunner
from sglite.runtime.models.loader import resolve_model

VOCAB = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,  # wide enough that the logits differ clearly
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_scaling": LINEAR_ROPE}),
    "yarn-rope": ("Qwen2", {"rope_scaling": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def tiny_reference(name: str, *, seed: int = 0) -> transformers.PreTrainedModel:
    """The transformers model, in float32, every weight random (biases and norms too)."""
    family, extra = TINY[name]
    config = getattr(transformers, f"{family}Config")(**(_SIZES | extra))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def tiny_executor(folder: Path, *, vocab_size: int = VOCAB, **options: Any) -> ModelRunner:
    """The executor of a model that was saved to `folder`."""
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "num_threads": 1,
        "max_rows": 8,
        "num_pages": 600,
    }
    config = EngineConfig(**(defaults | options))
    return build_executor(config, resolve_model(folder), vocab_size=vocab_size)
