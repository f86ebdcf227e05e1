"""What a model's config.json says, checked once: everything after this can rely on it.

Steps: find and read the file, refuse by name what is not implemented (with what works instead), then fill the frozen
`ModelConfig`. Imports no torch: the scheduler, the server and the command line read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglite.errors import InvalidRequest, ModelNotFound, UnsupportedModel

Architecture = Literal["llama", "qwen2", "qwen3"]
DType = Literal["float32", "float16", "bfloat16"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_BY_MODEL_TYPE: Mapping[str, Architecture] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
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
        return min(length, self.sliding_window or length)

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
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedModel(f"{file} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UnsupportedModel(f"{file} holds no JSON object")
        return cls.from_dict(values, name=str(folder), max_model_len=max_model_len)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, name: str = "the model", max_model_len: int | None = None
    ) -> ModelConfig:
        """The same from config.json's content. `name` is used in error texts."""
        _refuse_unsupported(values, name)
        architecture = _architecture(values, name)
        read = _Reader(values, name)
        hidden_size, num_heads = read.count("hidden_size"), read.count("num_attention_heads")
        bias = bool(values.get("attention_bias", False))
        scaling, theta = _rope(values, name)
        config = cls(
            architecture=architecture,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.count("intermediate_size"),
            num_layers=read.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.count("num_key_value_heads", num_heads),
            head_dim=read.count("head_dim", hidden_size // num_heads),
            max_position_embeddings=read.count("max_position_embeddings"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=bias or architecture == "qwen2",
            attention_out_bias=bias and architecture != "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(values, name, architecture, max_model_len),
            dtype=_dtype(values),
        )
        _check_shape(config, name)
        return config


class _Reader:
    """Positive integers from a config, with the field's name in the error."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self._name = name

    def count(self, field: str, default: int | None = None) -> int:
        value = self._values.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModel(f"{self._name}: config.json's {field!r} must be a positive integer, not {value!r}")
        return value


def _refuse_unsupported(values: Mapping[str, Any], name: str) -> None:
    """What other loaders would accept and this one does not, by its name."""
    names = [str(a) for a in values.get("architectures") or []]
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


def _architecture(values: Mapping[str, Any], name: str) -> Architecture:
    names = [str(a) for a in values.get("architectures") or []]
    for candidate in names:
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    model_type = str(values.get("model_type"))
    if not names and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    raise UnsupportedModel(f"{name} has the architecture {', '.join(names) or model_type}; {_WORKS}")


def _rope(values: Mapping[str, Any], name: str) -> tuple[RopeScaling | None, float]:
    """From `rope_scaling` and `rope_theta`, or from transformers 5's `rope_parameters`, which holds both."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedModel(f"{name}: config.json's rope parameters must be an object, not {given!r}")
    partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"{name} rotates only {partial} of each head, which is not supported")
    theta = float(given.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    original = given.get("original_max_position_embeddings") or values.get("max_position_embeddings")
    try:
        if kind == "default" or not given:
            return None, theta
        if kind == "linear":
            return LinearScaling(float(given["factor"])), theta
        if kind == "llama3":
            low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
            return Llama3Scaling(float(given["factor"]), low, high, int(original)), theta  # type: ignore[arg-type]
        if kind == "yarn":
            return _yarn(given, int(original)), theta  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{name}: rope scaling {kind!r} is incomplete: {error}") from error
    raise UnsupportedModel(f"{name} uses the rope scaling {kind!r}; what works: linear, llama3, yarn")


def _yarn(given: Mapping[str, Any], original: int) -> YarnScaling:
    def optional(field: str) -> float | None:
        return None if given.get(field) is None else float(given[field])

    return YarnScaling(
        factor=float(given["factor"]),
        original_max_position_embeddings=original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _sliding_window(
    values: Mapping[str, Any], name: str, architecture: Architecture, max_model_len: int | None
) -> int | None:
    """None where every layer attends to everything within the model's context."""
    window = values.get("sliding_window")
    # Qwen files carry a window that is off unless use_sliding_window says otherwise; Mistral's is on when it is there.
    used = bool(values.get("use_sliding_window", False)) if architecture != "llama" else True
    if "layer_types" in values and values["layer_types"]:
        used = "sliding_attention" in values["layer_types"]
    if not window or not used:
        return None
    if (max_model_len or int(values.get("max_position_embeddings") or 0)) <= int(window):
        return int(window)
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
