from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from sglite.errors import UnsupportedModel
from sglite.runtime.models.config import Llama3Scaling, ModelConfig
from sglite.runtime.models.gguf import convert_gguf
from sglite.runtime.models.gguf_tokenizer import tokenizer_files
from sglite.text.tokenizer import Tokenizer
from tests.runtime.models.gguf_files import hf_weights, write_gguf


def convert(tmp_path: Path, weights: dict[str, Any], **options: Any) -> Path:
    file, folder = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(file, weights, **options)
    folder.mkdir(exist_ok=True)
    convert_gguf(file, folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"tied": True}), ("qwen2", {"bias": True}), ("qwen3", {"qk_norm": True, "tied": True})],
)
def test_float_weights_come_out_as_they_went_in(tmp_path: Path, architecture: str, options: dict[str, bool]) -> None:
    weights = hf_weights(**options)
    folder = convert(tmp_path, weights, architecture=architecture)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], torch.from_numpy(value)), name
    config = ModelConfig.from_folder(folder)
    assert config.architecture == architecture
    assert config.tie_word_embeddings == options.get("tied", False)
    assert (config.attention_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert (config.rms_norm_eps, config.num_kv_heads, config.head_dim, config.dtype) == (1e-5, 2, 16, "float32")


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [
        (Kind.Q4_0, torch.float32, 0.5),
        (Kind.Q4_1, torch.float32, 0.25),
        (Kind.Q8_0, torch.float32, 0.02),
        (Kind.F16, torch.float16, 1e-2),
        (Kind.BF16, torch.bfloat16, 2e-2),
    ],
)
def test_quantised_weights_are_the_blocks_values(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: torch.dtype, error: float
) -> None:
    weights = hf_weights()
    found = load_file(convert(tmp_path, weights, quantised=kind) / "model.safetensors")
    for name, value in weights.items():
        matrix = value.ndim == 2
        assert found[name].dtype == (dtype if matrix else torch.float32)
        assert np.abs(found[name].float().numpy() - value).max() <= (error if matrix else 0)
    name = "model.layers.0.mlp.up_proj.weight"  # not permuted: exactly what the format says
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind)
    assert np.array_equal(found[name].float().numpy(), expected.reshape(weights[name].shape))


def test_the_tokenizer_and_stop_ids_come_along(tmp_path: Path) -> None:
    folder = convert(tmp_path, hf_weights(), extra={"tokenizer.chat_template": "{{ bos_token }}x"})
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("ab a é", add_special_tokens=True)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert [tokenizer.token_bytes(i) for i in ids] == [b"", b" ab", b" a", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.render_chat([]) == "<s>x"


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    def divisors(factor: float) -> np.ndarray:
        waves = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
        smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    folder = convert(tmp_path, hf_weights(), rope_freqs=divisors(32.0))
    assert ModelConfig.from_folder(folder).rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        convert(tmp_path, hf_weights(), rope_freqs=divisors(5.0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "gemma"}, "gemma.*llama"),
        ({"extra": {"llama.expert_count": 8}}, "mixture"),
        ({"extra": {"split.count": 3}}, "merge"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        convert(tmp_path, hf_weights(), **options)


@pytest.mark.parametrize("cut", [0, 3, 20, 100, 3_000, 9_000, 100_000])
def test_a_file_that_was_cut_off_says_so_and_its_name(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, hf_weights())
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UnsupportedModel, match=r"model\.gguf.*fetch it again"):
        convert_gguf(file, tmp_path)


@pytest.mark.parametrize("count", [b"\xff" * 8, b"\xff" * 4 + b"\0" * 4])
@pytest.mark.parametrize("at", [8, 16])  # how many tensors, how many fields
def test_counts_that_the_file_cannot_hold_end_at_once(tmp_path: Path, at: int, count: bytes) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, hf_weights())
    data = bytearray(file.read_bytes())
    data[at : at + 8] = count
    file.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"model\.gguf"):
        convert_gguf(file, tmp_path)


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"not a model" * 100)
    with pytest.raises(UnsupportedModel, match="cannot be read as GGUF"):
        convert_gguf(file, tmp_path)


class ByteLevelFields:
    """The metadata of a byte-level tokenizer."""

    def __init__(self, pre: str) -> None:
        self.values = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", "1", "2", "12", "Ġ"],
            "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
            "tokenizer.ggml.merges": ["1 2"],
            "tokenizer.ggml.eos_token_id": 1,
            "context_length": 32,
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def need(self, key: str) -> Any:
        return self.values[key]


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", [4]), ("smollm", [2, 3]), ("qwen2", [2, 3]), ("llama-bpe", [4])])
def test_pre_tokenizers_are_the_named_ones(tmp_path: Path, pre: str, pieces: list[int]) -> None:
    for name, value in tokenizer_files(ByteLevelFields(pre)).items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("12") == pieces
    assert tokenizer.stop_token_ids == (1, 0)  # eos first, then the other tokens that end a turn


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="deepseek"):
        tokenizer_files(ByteLevelFields("deepseek-llm"))
