"""One .gguf file to a Hugging Face folder: config.json, tokenizer files, generation_config.json, model.safetensors.

Steps: read the metadata, translate it to config.json (`_config`) and the tokenizer (`gguf_tokenizer.py`), then stream
the tensors one after the other into a single safetensors file, so that memory holds one tensor at a time.

Dequantised weights are stored in float32 up to a billion parameters: 4- and 8-bit blocks do not fit 16-bit floats
exactly, a CPU in float32 maps the file and uses it without a copy, and transformers reads the very same numbers. Above
that they are rounded once to bfloat16, or the folder would be eight times the file. F16, BF16 and F32 tensors stay as
they are.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from sglite.errors import UnsupportedModel
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.gguf_tokenizer import tokenizer_files

MAX_FLOAT32_PARAMETERS = 1_000_000_000

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
# rope_freqs holds Llama 3's scaling as one divisor a frequency. All published models use these.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


@dataclass(frozen=True)
class Metadata:
    """The key-value part of a GGUF file; keys of the architecture are found without their prefix."""

    fields: dict[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(key, self.fields.get(f"{self.architecture}.{key}"))
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"it has no {key!r}")
        return value


@dataclass(frozen=True)
class _Plan:
    """One tensor of the output file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    source: gguf.ReaderTensor

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.dtype == "F32" else 2)


def convert_gguf(file: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Write the Hugging Face folder for `file` into `folder`, which exists.

    Raises UnsupportedModel for a file that is no GGUF, another architecture, a mixture of experts, or a tokenizer or
    quantisation that cannot be carried over.
    """
    try:
        plans, metadata, files = _read(file)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, AttributeError) as error:
        raise UnsupportedModel(
            f"{file} cannot be read as GGUF: {_told(error)}; if it was fetched, fetch it again"
        ) from error
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as out:
        _write_tensors(out, plans, files["config.json"], metadata.architecture, progress)


def _told(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


class _Reader(gguf.GGUFReader):
    """Stops where the file ends: the base class goes on with nothing, as often as a damaged length says."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> NDArray[Any]:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes and would need {end}")
        return super()._get(offset, dtype, count, override_order)


def _read(file: Path) -> tuple[list[_Plan], Metadata, dict[str, dict[str, Any]]]:
    """Everything but the tensors' values. A damaged file raises whatever its bytes lead to."""
    reader = _Reader(file)
    metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    if metadata.architecture not in _ARCHITECTURES:
        works = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"it has the architecture {metadata.architecture!r}; GGUF files of {works} work")
    if metadata.get("expert_count"):
        raise UnsupportedModel("it is a mixture-of-experts model, which is not supported")
    if int(metadata.get("split.count", 1)) > 1:
        raise UnsupportedModel("it is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
    plans = _plan(reader)
    config = _config(metadata, reader, plans)
    ModelConfig.from_dict(config, name="its metadata")
    return plans, metadata, {"config.json": config, **tokenizer_files(metadata)}


def _plan(reader: gguf.GGUFReader) -> list[_Plan]:
    wide = sum(t.n_elements for t in reader.tensors) <= MAX_FLOAT32_PARAMETERS
    plans: list[_Plan] = []
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # becomes config.json's rope_scaling
            continue
        name = _hf_name(tensor.name)
        if name is None:
            raise UnsupportedModel(f"it has the tensor {tensor.name!r}, which no supported model has")
        dtype = {"F32": "F32", "F16": "F16", "BF16": "BF16"}.get(tensor.tensor_type.name, "F32" if wide else "BF16")
        shape = tuple(int(n) for n in reversed(tensor.shape))
        plans.append(_Plan(name, dtype, shape, tensor))
    return plans


def _hf_name(name: str) -> str | None:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    known = (_OUTER_NAMES if layer is None else _LAYER_NAMES).get(part)
    if known is None:
        return None
    return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


def _config(metadata: Metadata, reader: gguf.GGUFReader, plans: list[_Plan]) -> dict[str, Any]:
    by_name = {plan.name: plan for plan in plans}
    if "model.embed_tokens.weight" not in by_name:
        raise UnsupportedModel("it has no tensor 'token_embd.weight'")
    heads, hidden = int(metadata.need("attention.head_count")), int(metadata.need("embedding_length"))
    size: dict[str, int] = {}
    for plan in plans:
        size[plan.dtype] = size.get(plan.dtype, 0) + plan.num_bytes
    config = {
        "architectures": [_ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": by_name["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(metadata.need("feed_forward_length")),
        "num_hidden_layers": int(metadata.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("attention.head_count_kv", heads)),
        "head_dim": int(metadata.get("attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.need("context_length")),
        # Stored as float32: 9.999999747e-06 was written as 1e-05.
        "rms_norm_eps": float(f"{metadata.need('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, reader),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in by_name,
        "tie_word_embeddings": "lm_head.weight" not in by_name,
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[max(size, key=lambda d: size[d])],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if metadata.architecture == "qwen2":
        del config["attention_bias"]  # always there; the field does not exist
    return config


def _rope_scaling(metadata: Metadata, reader: gguf.GGUFReader) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata.need("rope.scaling.factor"))}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": float(metadata.need("rope.scaling.factor")),
            "original_max_position_embeddings": int(metadata.need("rope.scaling.original_context_length")),
        }
    if kind != "none":
        raise UnsupportedModel(f"the GGUF file uses the rope scaling {kind!r}; what works: linear, yarn, llama3")
    divisors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if divisors is None:
        return None
    theta = float(metadata.get("rope.freq_base", 10000.0))
    for factor in _LLAMA3_FACTORS:
        if np.allclose(divisors, _llama3_divisors(theta, 2 * len(divisors), factor), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UnsupportedModel("the GGUF file's rope_freqs are not those of a Llama 3 model; its scaling is unknown")


def _llama3_divisors(theta: float, dim: int, factor: float) -> NDArray[np.float64]:
    """By how much Llama 3.1 divides each of the dim / 2 frequencies: 1 for short waves, `factor` for long ones."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * np.pi * theta ** (np.arange(0, dim, 2) / dim))
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - ramp) / factor + ramp)


def _write_tensors(
    out: BinaryIO, plans: list[_Plan], config: dict[str, Any], architecture: str, progress: Progress | None
) -> None:
    """The safetensors format: length of the header (u64, little endian), the header as JSON, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in plans:
        begin, end = end, end + plan.num_bytes
        header[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    written = 0
    for plan in plans:
        values = _values(plan)
        heads = _paired_heads(plan.name, config) if architecture == "llama" else 0
        if heads:
            values = _split_pairs(values, heads)
        for piece in _pieces(values):
            out.write(piece)
            written += len(piece)
            if progress is not None:
                progress(written, end)


def _values(plan: _Plan) -> NDArray[Any]:
    """The tensor in its output type; bfloat16 as its bits in uint16."""
    tensor = plan.source
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        return np.ascontiguousarray(tensor.data).view(np.uint16).reshape(plan.shape)
    if plan.dtype == "F16":
        return tensor.data.reshape(plan.shape)
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(plan.shape)
    except NotImplementedError as error:
        raise UnsupportedModel(f"the quantisation {tensor.tensor_type.name} of {tensor.name} is not known") from error
    values = np.ascontiguousarray(values, dtype=np.float32)
    if plan.dtype == "F32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even


def _paired_heads(name: str, config: dict[str, Any]) -> int:
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".self_attn.k_proj." in name else 0


def _split_pairs(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """GGUF's llama keeps the two rows that rotate together side by side, Hugging Face half a head apart."""
    return values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _pieces(values: NDArray[Any], size: int = 1 << 24) -> Iterator[memoryview]:
    data = np.ascontiguousarray(values).data.cast("B")
    for at in range(0, len(data), size):
        yield data[at : at + size]
