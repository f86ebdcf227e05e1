from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglite.errors import InvalidRequest, ModelError, ModelNotFound, UnsupportedModel
from sglite.runtime.config import EngineConfig
from sglite.runtime.executor.build import build_executor
from sglite.runtime.models import loader
from sglite.runtime.models.loader import fill_dummy_, iter_weights, resolve_model
from tests.runtime.models.gguf_files import hf_weights, write_gguf
from tests.runtime.models.test_config import LLAMA


def folder_with(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_weights_of_one_file_are_mapped_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_GROUP_ELEMENTS", 5)  # several mappings
    tensors = {f"model.layers.{i}.w.weight": torch.randn(2, 3).bfloat16() for i in range(7)}
    save_file(tensors, folder_with(tmp_path) / "model.safetensors")
    found = dict(iter_weights(resolve_model(tmp_path)))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    save_file({"a.weight": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b.weight": torch.ones(2)}, folder / "model-2.safetensors")
    index = {"weight_map": {"b.weight": "model-2.safetensors", "a.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [name for name, _ in iter_weights(resolve_model(folder))] == ["a.weight", "b.weight"]
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"1 of its 2.*model-2"):
        resolve_model(folder)


def test_a_tied_head_and_rotary_tables_are_left_out(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, folder_with(tmp_path / "tied", tie_word_embeddings=True) / "model.safetensors")
    assert [name for name, _ in iter_weights(resolve_model(tmp_path / "tied"))] == ["model.embed_tokens.weight"]
    save_file(tensors, folder_with(tmp_path / "own") / "model.safetensors")
    assert len(dict(iter_weights(resolve_model(tmp_path / "own")))) == 2


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    (folder_with(tmp_path) / "model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
    with pytest.raises(ModelError, match="damaged"):
        list(iter_weights(resolve_model(tmp_path)))


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.norm.weight", torch.ones(65), r"'model.norm.weight': .*\(65,\).*config.json asks for \(64,\)"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), "'model.norm.weight' is stored as torch.int8"),
        ("model.surprise.weight", torch.ones(1), "'model.surprise.weight' that this architecture does not know"),
        ("model.norm.weight", None, "lacks 1 tensors, for example model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, says: str
) -> None:
    weights = {key: torch.from_numpy(value) for key, value in hf_weights().items()}
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    rows = len(weights["model.embed_tokens.weight"])
    save_file(weights, folder_with(tmp_path, vocab_size=rows, intermediate_size=96) / "model.safetensors")
    config = EngineConfig(model=str(tmp_path), device="cpu", num_threads=1, num_pages=8, max_rows=1)
    with pytest.raises(ModelError, match=says):
        build_executor(config, resolve_model(tmp_path), vocab_size=rows)


@pytest.mark.parametrize("size", [{"vocab_size": 2**31 - 1}, {"hidden_size": 2**30}, {"intermediate_size": 2**31 - 1}])
def test_a_model_that_the_machine_has_no_room_for_is_refused_before_it_is_made(tmp_path: Path, size: Any) -> None:
    config = EngineConfig(model=str(folder_with(tmp_path, **size)), device="cpu", num_threads=1, load_format="dummy")
    with pytest.raises(ModelError, match=r"GiB as float32, and .* GiB are free"):
        build_executor(config, resolve_model(tmp_path, load_format="dummy"), vocab_size=512)


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with pytest.raises(ModelNotFound, match="dummy"):
        resolve_model(folder)
    for path in (folder, folder / "config.json"):
        source = resolve_model(path, load_format="dummy")
        assert source.is_dummy
        assert list(iter_weights(source)) == []


def test_dummy_values_depend_on_seed_and_name_alone() -> None:
    def filled(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.empty(64, 64, dtype=dtype)
        fill_dummy_(tensor, name, seed)
        return tensor

    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(filled(name), filled(name))
    assert not torch.equal(filled(name), filled(name, seed=1))
    assert not torch.equal(filled(name), filled(name.replace("q_proj", "k_proj")))
    assert 0.015 < filled(name, dtype=torch.bfloat16).float().std() < 0.025
    assert filled("model.norm.weight").eq(1).all()
    assert filled("model.layers.0.self_attn.q_norm.weight").eq(1).all()
    assert filled("model.layers.0.self_attn.q_proj.bias").eq(0).all()


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert resolve_model(folder, load_format="dummy").generation.temperature is None
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(values))
    found = resolve_model(folder, load_format="dummy").generation
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.9, 20, None)


@pytest.mark.parametrize("content", ["[]", "[" * 50_000, '{"temperature": "hot"}', '{"top_p": 7}'])
def test_a_damaged_generation_config_is_told_by_its_name(tmp_path: Path, content: str) -> None:
    (folder_with(tmp_path) / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json"):
        resolve_model(tmp_path, load_format="dummy")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_damaged_index_is_told_by_its_name(tmp_path: Path, content: str) -> None:
    (folder_with(tmp_path) / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"index\.json.*(object|weight_map)"):
        resolve_model(tmp_path)


def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "elsewhere.safetensors")
    index = folder_with(tmp_path / "model") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(UnsupportedModel, match="own folder"):
        resolve_model(tmp_path / "model")


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", hf_weights())
    first = resolve_model(folder / "tiny.gguf")
    stamp = first.weight_files[0].stat().st_mtime_ns
    assert resolve_model(folder).weight_files[0].stat().st_mtime_ns == stamp  # the folder's only file
    assert len(dict(iter_weights(first))) == len(hf_weights())
    write_gguf(folder / "tiny.gguf", hf_weights(seed=1, tied=True))
    assert resolve_model(folder / "tiny.gguf").config.tie_word_embeddings  # another file of that name
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"other\.gguf, tiny\.gguf"):
        resolve_model(folder)


def test_what_is_no_model_says_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2"):
        resolve_model("no-such-model")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedModel, match="unknown kind"):
        resolve_model(tmp_path / "notes.txt")
    (folder_with(tmp_path) / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pickled"):
        resolve_model(tmp_path)
    with pytest.raises(InvalidRequest, match="load_format"):
        resolve_model(tmp_path, load_format="magic")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="not a gguf model"):
        resolve_model(tmp_path, load_format="gguf")
