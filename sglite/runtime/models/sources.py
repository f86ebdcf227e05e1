"""A model's name or path to the files that hold it.

`resolve_model` tries, in order: a built-in name (`smollm2`), a Hugging Face folder, a .gguf file (converted once into
the cache), a config.json for dummy weights, and a hub id `owner/name`. Imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sglite.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from sglite.protocol import SamplingParams
from sglite.runtime.models import cache
from sglite.runtime.models.config import ModelConfig
from sglite.runtime.models.pull import BUILT_IN, pull_built_in, pull_from_hub
from sglite.text.json_file import read_object

DEFAULT_MODEL = "smollm2"

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values of the model's generation_config.json; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationDefaults:
        file = folder / "generation_config.json"
        if not file.is_file():
            return cls()
        values = read_object(file)
        found: dict[str, Any] = {name: values.get(name) for name in cls.__dataclass_fields__}
        try:
            SamplingParams(**found)
        except InvalidRequest as error:
            raise UnsupportedModel(f"{file}: {error}; correct the file") from error
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where everything of one model is. Paths exist."""

    name: str  # as it was asked for
    folder: Path  # of config.json and the weights
    config: ModelConfig
    tokenizer_folder: Path
    generation: GenerationDefaults
    weight_files: tuple[Path, ...]  # safetensors; empty for dummy weights

    @property
    def is_dummy(self) -> bool:
        return not self.weight_files


def resolve_model(
    name_or_path: str | Path,
    *,
    load_format: LoadFormat = "auto",
    tokenizer: str | Path | None = None,
    max_model_len: int | None = None,
) -> ModelSource:
    """Find a model, fetching or converting it at first use.

    `load_format`: "dummy" makes weights up, so only config.json is needed; "safetensors" and "gguf" only check what
    "auto" finds out by itself. `tokenizer`: another folder for the tokenizer. `max_model_len` lets a sliding-window
    model through where the window cannot matter.
    Raises ModelNotFound, UnsupportedModel or InvalidRequest, each saying what to do.
    """
    if load_format not in get_args(LoadFormat):
        works = ", ".join(map(repr, get_args(LoadFormat)))
        raise InvalidRequest(f"load_format must be one of {works}, not {load_format!r}", param="load_format")
    is_gguf = Path(name_or_path).suffix == ".gguf"
    if load_format in ("safetensors", "gguf") and is_gguf != (load_format == "gguf"):
        raise InvalidRequest(
            f"{name_or_path} is not a {load_format} model; leave load_format at 'auto'", param="load_format"
        )
    folder = _model_folder(name_or_path)
    return ModelSource(
        name=str(name_or_path),
        folder=folder,
        config=ModelConfig.from_folder(folder, max_model_len=max_model_len),
        tokenizer_folder=folder if tokenizer is None else _model_folder(tokenizer),
        generation=GenerationDefaults.from_folder(folder),
        weight_files=() if load_format == "dummy" else weight_files(folder),
    )


def _model_folder(name_or_path: str | Path) -> Path:
    name = str(name_or_path)
    if name in BUILT_IN:
        return pull_built_in(name)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _single_gguf(path) or path
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted(path)
        if path.name == "config.json":
            return path.parent
        raise UnsupportedModel(f"{path} is a file of an unknown kind; give a model folder, its config.json or a .gguf")
    if _HUB_ID.fullmatch(name):
        return pull_from_hub(name)
    known = ", ".join(repr(n) for n in BUILT_IN)
    raise ModelNotFound(
        f"no model {name!r}: there is no such file or folder here; give a local folder, a .gguf file, a hub id "
        f"'owner/name', or {known}"
    )


def _single_gguf(folder: Path) -> Path | None:
    """A folder that holds one .gguf file and no config.json means that file."""
    files = [] if (folder / "config.json").is_file() else sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{folder} holds several GGUF files; give one of them: {names}")
    return _converted(files[0]) if files else None


def _converted(file: Path) -> Path:
    from sglite.runtime.models.gguf import convert_gguf  # brings the gguf package in: only where it is needed
    from sglite.runtime.models.progress import bytes_progress

    stat = file.stat()
    identity = f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    key = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def build(folder: Path) -> None:
        with bytes_progress(f"Converting {file.name}") as progress:
            convert_gguf(file, folder, progress=progress)

    return cache.build_once(key, build)


def _shards(index: Path) -> list[str]:
    """Names of files beside the index, each once."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UnsupportedModel(f"{index} has no 'weight_map' of tensors to files")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedModel(f"{index}: 'weight_map' must name files of its own folder, not {name!r}")
    return sorted(set(shards.values()))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, in order. Raises ModelNotFound or UnsupportedModel."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _shards(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {len(missing)} of its {len(names)} weight files: {missing[0]}, ...")
        return tuple(folder / name for name in names)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    if any(folder.glob("pytorch_model*.bin")):
        raise UnsupportedModel(
            f"{folder} has its weights as pickled .bin files, which are not loaded; save them as safetensors "
            "(transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder))"
        )
    raise ModelNotFound(f"{folder} has no model.safetensors; for random weights pass load_format='dummy'")
