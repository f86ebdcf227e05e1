"""Tiny GGUF files, written the way the converters of that format write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁ab"]


def hf_weights(*, tied: bool = False, bias: bool = False, qk_norm: bool = False, seed: int = 0) -> dict[str, Any]:
    """Random float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {"model.embed_tokens.weight": make(len(TOKENS), HIDDEN), "model.norm.weight": make(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = make(len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", MLP, HIDDEN),
            ("mlp.up_proj", MLP, HIDDEN),
            ("mlp.down_proj", HIDDEN, MLP),
        ):
            weights[f"{layer}{name}.weight"] = make(rows, columns)
            if bias and name[-6] in "qkv":
                weights[f"{layer}{name}.bias"] = make(rows)
        norms = ["input_layernorm", "post_attention_layernorm"]
        weights.update({f"{layer}{name}.weight": make(HIDDEN) for name in norms})
        if qk_norm:
            weights.update({f"{layer}self_attn.{n}_norm.weight": make(HEAD_DIM) for n in "qk"})
    return weights


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def write_gguf(
    file: Path,
    weights: dict[str, Any],
    *,
    architecture: str = "llama",
    quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    rope_freqs: NDArray[np.float32] | None = None,
) -> None:
    """`quantised` is the type of the matrices; `extra`: metadata, strings and integers and floats."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * 5)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, value in weights.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = HEADS if ".q_proj." in name else KV_HEADS
            value = value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 2 and quantised != gguf.GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(np.ascontiguousarray(value), quantised)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
