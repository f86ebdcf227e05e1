"""`sglite trace`, on a scripted backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from sglite import cli
from tests.fakes.client import ScriptedClient

PROGRAM = """
import sglite as sgl

@sgl.function
def program(s):
    s += "a" + sgl.gen("x")
"""


class ScriptedEngine(ScriptedClient):
    def __init__(self, **options: Any) -> None:
        super().__init__()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        sgl.set_default_backend(None)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl, "Engine", ScriptedEngine)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def trace(folder: Path, text: str) -> int:
    (folder / "file.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(folder / "file.py"), "--out", str(folder / "out.json")])
    return int(ended.value.code or 0)


def test_what_a_file_ran_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace(tmp_path, PROGRAM + "program.run()\n") == 0
    assert "timeline of 1 run:" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())


def test_a_file_that_runs_no_program_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace(tmp_path, PROGRAM) == 1
    assert "has run no program" in (shown := capsys.readouterr().err)
    assert "my_program.run(...)" in shown
    assert not (tmp_path / "out.json").exists()


def test_a_name_of_no_known_kind_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text("print('ran')")
    with pytest.raises(SystemExit):
        cli.main(["trace", str(tmp_path / "file.py"), "--out", "run.txt"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "must end with .html, .json or .trace.json" in shown.err
