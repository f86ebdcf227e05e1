from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglite.errors import ModelNotFound, UnsupportedModel
from sglite.runtime.models.config import MAX_CONTEXT, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "torch_dtype": "bfloat16",
}


def make(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def test_a_llama_config_is_read() -> None:
    config = make()
    assert config.architecture == "llama"
    assert (config.head_dim, config.num_layers, config.rope_theta, config.dtype) == (16, 2, 100000.0, "bfloat16")
    assert not (config.attention_bias or config.qk_norm or config.tie_word_embeddings)
    assert config.max_context == 4096


def test_each_architecture_has_its_biases_and_norms() -> None:
    qwen2 = make(architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=False)
    assert (qwen2.architecture, qwen2.attention_bias, qwen2.attention_out_bias) == ("qwen2", True, False)
    qwen3 = make(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.architecture, qwen3.qk_norm, qwen3.head_dim, qwen3.attention_bias) == ("qwen3", True, 32, False)
    biased = make(attention_bias=True)
    assert (biased.attention_bias, biased.attention_out_bias) == (True, True)
    assert make(architectures=["MistralForCausalLM"], sliding_window=None).architecture == "llama"
    assert make(architectures=None).architecture == "llama"


def test_rope_scaling_is_read_in_both_spellings() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    expected = Llama3Scaling(8.0, 1.0, 4.0, 1024)
    assert make(rope_scaling={"rope_type": "llama3", **llama3}).rope_scaling == expected
    new = make(rope_theta=1.0, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert (new.rope_scaling, new.rope_theta) == (expected, 5e5)
    assert make(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_parameters_are_counted() -> None:
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert make().num_parameters == 2 * layer + 2 * 512 * 64
    assert make(tie_word_embeddings=True).num_parameters == 2 * layer + 512 * 64


def test_scaled_context_counts_the_factor() -> None:
    yarn = make(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048})
    assert yarn.rope_scaling == YarnScaling(4.0, 2048)
    assert yarn.max_context == 8192
    linear = make(rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope_scaling == LinearScaling(2.0)
    assert linear.max_context == 8192


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture-of-experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "mixture-of-experts"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "images"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "MLP"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "rotates only"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "share"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, "max_model_len=1024"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": True}, "sliding"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": 5}, "config.json's 'architectures' must be a list of texts, not 5"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures'"),
        ({"hidden_size": -64}, "'hidden_size' must be a positive integer"),
        ({"vocab_size": 10**30}, "'vocab_size'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'.*at most 4096"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' must be a number above 0, not 'small'"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
        ({"rope_theta": 0}, "'rope_theta'"),
        ({"rope_theta": float("inf")}, "'rope_theta'.*not finite"),
        ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false"),
        ({"sliding_window": "abc"}, "'sliding_window'"),
        ({"layer_types": 5}, "'layer_types'"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling: 'factor' must be a number above 0, not -1"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "'beta_fast'"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "'rope_theta' must be above 1 for yarn"),
    ],
)
def test_a_value_of_another_kind_is_told_by_its_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        make(**changes)


def test_null_is_the_same_as_absent_and_whole_floats_are_counts() -> None:
    nothing = make(rms_norm_eps=None, rope_theta=None, attention_bias=None, sliding_window=None, layer_types=None)
    assert (nothing.rms_norm_eps, nothing.rope_theta, nothing.attention_bias) == (1e-6, 10000.0, False)
    assert make(hidden_size=64.0).hidden_size == 64
    assert make(rope_scaling={"type": "linear", "factor": 1e30}).max_context == MAX_CONTEXT


def test_a_window_that_never_matters_is_accepted() -> None:
    values = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    assert ModelConfig.from_dict(values, max_model_len=1024).max_context == 1024
    assert make(sliding_window=4096).max_context == 4096
    assert make(sliding_window=8, layer_types=["full_attention"] * 2).sliding_window is None


def test_folders_that_hold_no_model_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path).vocab_size == 512
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="LoRA.*merge"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        ModelConfig.from_folder(tmp_path)


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, sglite.runtime.models.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
