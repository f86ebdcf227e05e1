"""Llama 2 and 3, SmolLM2, Mistral: pre-norm decoder with grouped-query attention and a gated MLP."""

from __future__ import annotations

from sglite.runtime.layers.context import LayerContext
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.decoder import Decoder, build_decoder


def build(config: ModelConfig, context: LayerContext, *, max_len: int) -> Decoder:
    return build_decoder(
        config, context, max_len=max_len, qkv_bias=config.attention_bias, out_bias=config.attention_out_bias
    )
