"""Qwen2 and Qwen2.5: as Llama, with biases on the q, k and v projections."""

from __future__ import annotations

from sglite.runtime.layers.context import LayerContext
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.decoder import Decoder, build_decoder


def build(config: ModelConfig, context: LayerContext, *, max_len: int) -> Decoder:
    return build_decoder(config, context, max_len=max_len, qkv_bias=True)
