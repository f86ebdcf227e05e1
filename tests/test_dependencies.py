"""What the package imports is what pyproject.toml declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "flashinfer": "flashinfer-python",
    "pydantic_ai": "pydantic-ai-slim",
}  # import name -> its package
# Brought along by a package that cannot be without them; huggingface_hub is optional by design.
WITH_OTHERS = {"starlette", "triton", "huggingface_hub"}


def imported(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], file) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0], file


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=! ]", each)[0].lower().replace("-", "_") for each in requirements}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    run = names(project["dependencies"]) | names(extras["cuda"]) | names(extras["bench"])
    known = sys.stdlib_module_names | {"sglite", "tests"} | WITH_OTHERS
    for folder, declared in (("sglite", run), ("examples", run), ("tests", run | names(extras["dev"]))):
        for name, file in imported(ROOT / folder):
            found = DISTRIBUTIONS.get(name, name).replace("-", "_")
            assert name in known or found in declared, f"{file.relative_to(ROOT)} imports {name}, which is not declared"
