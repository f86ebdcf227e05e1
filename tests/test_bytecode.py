"""Byte code is kept in our folder where Python keeps none, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, sys
from sglite import bytecode
with bytecode.kept():
    import torch
after = sys.dont_write_bytecode, sys.pycache_prefix
variables = bytecode.environment()
names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
print(json.dumps([*after, *(variables.get(name) for name in names)]))
"""


def run(folder: Path, **variables: str) -> list[object]:
    """With a torch of its own, in `folder`; what is left of Python's settings, and what a child process gets."""
    packages = folder / "packages"
    (packages / "torch").mkdir(parents=True, exist_ok=True)
    (packages / "torch" / "__init__.py").write_text("from torch import other\n")
    (packages / "torch" / "other.py").touch()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join((str(packages), str(ROOT)))
    environment = inherited | {"PYTHONPATH": path, "SGLITE_HOME": str(folder / "home")} | variables
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def kept(folder: Path) -> set[str]:
    return {file.name.partition(".")[0] for file in folder.rglob("*.pyc")}


@pytest.mark.slow
def test_it_is_kept_where_python_may_not_write_any(tmp_path: Path) -> None:
    ours = str(tmp_path / "home" / "bytecode")
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1") == [True, None, None, ours]
    assert kept(tmp_path / "home") == {"__init__", "other"}
    assert not kept(tmp_path / "packages")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [None, "elsewhere"])
def test_python_is_left_to_keep_it_where_it_does(tmp_path: Path, prefix: str | None) -> None:
    place = None if prefix is None else str(tmp_path / prefix)
    variables = {} if place is None else {"PYTHONPYCACHEPREFIX": place}
    assert run(tmp_path, **variables) == [False, place, None, place]
    assert not kept(tmp_path / "home")
    assert {"__init__", "other"} <= kept(tmp_path / (prefix or "packages"))
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1", **variables) == [True, place, "1", place], "it is there already"
