"""The wheel, the image's steps and the pages that are made from the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, **env: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_options_page_is_made_from_the_code() -> None:
    run(sys.executable, "scripts/options_page.py", "--check")


def test_every_page_that_a_page_links_exists() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_the_dockerfile_runs_only_the_tested_steps() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert [step for step in steps if "image" not in step] == [
        "useradd --create-home --uid 1000 sglite && mkdir /models && chown sglite /models"
    ]


@pytest.mark.slow
def test_the_images_steps_give_a_working_command(tmp_path: Path) -> None:
    """Without a container engine, and without fetching anything: dependencies come from this environment."""
    offline = "--no-build-isolation --no-index --no-deps"
    run("scripts/image.sh", "build", str(tmp_path), PYTHON=sys.executable, PIP_ARGS="--no-build-isolation")
    (wheel,) = tmp_path.glob("sglite-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sglite/runtime/server/routes/chat.py" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=False)
    python = tmp_path / "env/bin/python"
    run("scripts/image.sh", "install", str(tmp_path), str(python), PIP_ARGS=offline)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    here = next((tmp_path / "env/lib").glob("python*/site-packages"))
    (here / "dependencies.pth").write_text(site)
    assert run(str(python), "-m", "pip", "--version")
    assert "sglite" in run(str(tmp_path / "env/bin/sglite"), "--version")
    assert "--api-key" in run(str(tmp_path / "env/bin/sglite"), "serve", "--help")
