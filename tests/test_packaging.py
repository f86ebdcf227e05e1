"""The wheel, the image's steps and the pages that are made from the code."""

from __future__ import annotations

import os
import re
import shutil
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


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_interrupted_quickstart_goes_on_behind_torch(tmp_path: Path) -> None:
    """With a Python that only writes down what it is asked, and an install of sglite that fails once."""
    log, env = tmp_path / "log", tmp_path / "env"
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {log}\n'
        f'case "$*" in\n'
        f"  *venv*) rm -rf {env}; mkdir -p {env}/bin; cp $0 {env}/bin/python;;\n"
        f"  *editable*) test -e {tmp_path}/failed || {{ touch {tmp_path}/failed; exit 1; }};;\n"
        "esac\n"
    )
    fake.chmod(0o755)
    command = ["make", "quickstart", f"PYTHON={fake}", f"RUN_ENV={env}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0
    run(*command)
    asked = log.read_text()
    assert (asked.count("-m venv"), asked.count("--editable")) == (1, 2)
    assert asked.rstrip().endswith("examples/quickstart.py")
    run(*command)
    assert log.read_text().count("-m pip") == asked.count("-m pip")


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


@pytest.mark.packaging
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
