"""What a model's config.json says, checked once: everything after this can rely on it.

Steps: find and read the file, refuse by name what is not implemented (with what works instead), then fill the frozen
`ModelConfig`. Imports no torch: the scheduler, the server and the command line read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglite.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from sglite.runtime.models.fields import Fields
from sglite.text.json_file import read_object

Architecture = Literal["llama", "qwen2", "qwen3"]
DType = Literal["float32", "float16", "bfloat16"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_BY_MODEL_TYPE: Mapping[str, Architecture] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
MAX_CONTEXT = 1 << 23  # tokens; the CPU's attention has room for as many scores
_MAX_LAYERS = 4096
_WORKS = "what works: " + ", ".join(ARCHITECTURES) + " with unquantised float32, float16 or bfloat16 weights, or GGUF"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `attention_factor` None: computed from factor, mscale and mscale_all_dim."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: Architecture
    vocab_size: int  # rows of the embedding: may be larger than the tokenizer's (a padded tail)
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # as the file says; `max_context` counts the rope scaling in
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q, k and v projections
    attention_out_bias: bool = False  # the output projection
    qk_norm: bool = False  # RMS norm over head_dim of q and k, before rope
    hidden_act: Literal["silu"] = "silu"
    sliding_window: int | None = None  # set only where max_model_len keeps it from ever mattering
    dtype: DType = "float32"  # of the weights as stored, where the file says so

    @property
    def max_context(self) -> int:
        """Tokens that the position encoding was made for, rope scaling included."""
        scaling = self.rope_scaling
        length = self.max_position_embeddings
        if isinstance(scaling, YarnScaling):
            length = max(length, int(scaling.factor * scaling.original_max_position_embeddings))
        elif isinstance(scaling, LinearScaling):
            length = int(scaling.factor * length)
        return max(1, min(length, self.sliding_window or length, MAX_CONTEXT))

    @property
    def num_parameters(self) -> int:
        """Of the matrices; norms and biases are too few to count."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @classmethod
    def from_folder(cls, path: str | Path, *, max_model_len: int | None = None) -> ModelConfig:
        """Read `path`/config.json.

        A model with sliding-window attention is accepted only when `max_model_len` stays within the window, where it
        is the same as full attention. Raises ModelNotFound without a config.json, UnsupportedModel for what is not
        implemented, naming it.
        """
        folder = Path(path)
        file = folder / "config.json"
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedModel(
                f"{folder} is a LoRA/PEFT adapter, which is not supported; merge it into its base model first "
                "(peft: model.merge_and_unload().save_pretrained(folder)) and load that folder"
            )
        if not file.is_file():
            raise ModelNotFound(f"{file} does not exist; give a Hugging Face model folder or a .gguf file")
        return cls.from_dict(read_object(file), name=str(folder), max_model_len=max_model_len)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, name: str = "the model", max_model_len: int | None = None
    ) -> ModelConfig:
        """The same from config.json's content. `name` is used in error texts."""
        read = Fields(values, f"{name}: config.json's")
        _refuse_unsupported(values, read, name)
        architecture = _architecture(values, read, name)
        hidden_size, num_heads = read.count("hidden_size"), read.count("num_attention_heads")
        bias = read.flag("attention_bias")
        scaling, theta = _rope(values, read, name)
        config = cls(
            architecture=architecture,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.count("intermediate_size"),
            num_layers=read.count("num_hidden_layers", most=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=read.count("num_key_value_heads", num_heads),
            head_dim=read.count("head_dim", hidden_size // num_heads),
            max_position_embeddings=read.count("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            attention_bias=bias or architecture == "qwen2",
            attention_out_bias=bias and architecture != "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(values, read, name, architecture, max_model_len),
            dtype=_dtype(values),
        )
        _check_shape(config, name)
        return config


def _refuse_unsupported(values: Mapping[str, Any], read: Fields, name: str) -> None:
    """What other loaders would accept and this one does not, by its name."""
    names = read.texts("architectures")
    label = names[0] if names else str(values.get("model_type"))
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = str(quantised.get("quant_method", "unknown")) if isinstance(quantised, Mapping) else "unknown"
        raise UnsupportedModel(f"{name} is quantised with {method.upper()}, which is not supported; {_WORKS}")
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(k)), None)
    if experts or "moe" in label.lower() or "mixtral" in label.lower():
        raise UnsupportedModel(f"{name} ({label}) is a mixture-of-experts model, which is not supported; {_WORKS}")
    if any(k in values for k in ("vision_config", "audio_config")) or "ForConditionalGeneration" in label:
        raise UnsupportedModel(f"{name} ({label}) takes images or audio, which is not supported; {_WORKS}")
    if values.get("mlp_bias"):
        raise UnsupportedModel(f"{name} has biases in its MLP, which is not supported; {_WORKS}")
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{name} uses the activation {activation!r}; only silu is supported")


def _architecture(values: Mapping[str, Any], read: Fields, name: str) -> Architecture:
    names = read.texts("architectures")
    for candidate in names:
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    model_type = str(values.get("model_type"))
    if not names and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    raise UnsupportedModel(f"{name} has the architecture {', '.join(names) or model_type}; {_WORKS}")


def _rope(values: Mapping[str, Any], read: Fields, name: str) -> tuple[RopeScaling | None, float]:
    """From `rope_scaling` and `rope_theta`, or from transformers 5's `rope_parameters`, which holds both."""
    field = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    given = read.object(field)
    partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"{name} rotates only {partial} of each head, which is not supported")
    scaling = Fields(given, f"{name}: config.json's {field}:")
    theta = scaling.number("rope_theta", read.number("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default" or not given:
        return None, theta
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(f"{name} uses the rope scaling {kind!r}; what works: linear, llama3, yarn")
    factor = scaling.number("factor")
    if kind == "linear":
        return LinearScaling(factor), theta
    original = scaling.count("original_max_position_embeddings", read.count("max_position_embeddings"))
    if kind == "yarn":
        if theta <= 1:
            raise read.wrong("rope_theta", "above 1 for yarn", theta)
        return _yarn(given, scaling, factor, original), theta
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.wrong("high_freq_factor", f"above low_freq_factor ({low:g})", high)
    return Llama3Scaling(factor, low, high, original), theta


def _yarn(given: Mapping[str, Any], read: Fields, factor: float, original: int) -> YarnScaling:
    def some(field: str) -> float | None:  # 0 is written for "not given"
        return read.optional(field) if given.get(field) else None

    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=some("beta_fast") or 32.0,
        beta_slow=some("beta_slow") or 1.0,
        attention_factor=read.optional("attention_factor"),
        mscale=some("mscale"),
        mscale_all_dim=some("mscale_all_dim"),
        truncate=read.flag("truncate", True),
    )


def _sliding_window(
    values: Mapping[str, Any], read: Fields, name: str, architecture: Architecture, max_model_len: int | None
) -> int | None:
    """None where every layer attends to everything within the model's context."""
    # Qwen files carry a window that is off unless use_sliding_window says otherwise; Mistral's is on when it is there.
    used = read.flag("use_sliding_window") if architecture != "llama" else True
    layers = read.texts("layer_types")
    if layers:
        used = "sliding_attention" in layers
    if not used or not values.get("sliding_window"):
        return None
    window = read.count("sliding_window")
    if (max_model_len or read.count("max_position_embeddings")) <= window:
        return window
    raise UnsupportedModel(
        f"{name} uses sliding-window attention over {window} tokens, which is not supported; "
        f"pass max_model_len={window} or less, where it makes no difference"
    )


def _dtype(values: Mapping[str, Any]) -> DType:
    match str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch."):
        case "bfloat16":
            return "bfloat16"
        case "float16":
            return "float16"
        case _:
            return "float32"


def _check_shape(config: ModelConfig, name: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"{name}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise UnsupportedModel(f"{name}: head_dim {config.head_dim} is odd, so it cannot be rotated")


def max_context(asked: int | None, config: ModelConfig) -> int:
    """Tokens that prompt and output may have together; `asked`: EngineConfig.max_model_len. Raises InvalidRequest for
    more than the model knows."""
    if asked is None:
        return config.max_context
    if asked > config.max_context:
        raise InvalidRequest(
            f"max_model_len={asked} is more than the {config.max_context} tokens that the model was made for",
            param="max_model_len",
        )
    return asked
