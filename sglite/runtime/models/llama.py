"""Llama 2 and 3, SmolLM2, Mistral: pre-norm decoder with grouped-query attention and a gated MLP."""

from __future__ import annotations

from sglite.runtime.layers.attention import Attention
from sglite.runtime.layers.context import LayerContext
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.decoder import Decoder


def build(config: ModelConfig, context: LayerContext, *, max_len: int) -> Decoder:
    attentions = [_attention(i, config, context) for i in range(config.num_layers)]
    return Decoder(attentions, config, context, max_len=max_len)


def _attention(layer: int, config: ModelConfig, context: LayerContext) -> Attention:
    return Attention(
        layer,
        context,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
    )
