from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglite import cli
from sglite._version import __version__
from sglite.errors import InvalidRequest


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_version_and_help_name_everything_without_importing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from sglite.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'sglite.cli.model', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    present = [name for name, command in cli.COMMANDS.items() if find_spec(command.module)]
    assert "model" in present
    assert all(f"  {name} " in done.stdout for name in present)
    assert run("--version") == 0
    assert capsys.readouterr().out == f"sglite {__version__}\n"


def test_a_misspelled_command_is_answered_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("modle") == 2
    assert "model" in capsys.readouterr().err


def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails_for_test.py").write_text(
        f"from {InvalidRequest.__module__} import InvalidRequest\n"
        "def command(): raise InvalidRequest('do it differently')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "fails", cli.Command("fails_for_test", "x"))
    assert run("fails") == 1
    assert capsys.readouterr().err == "sglite: error: do it differently\n"


def test_a_missing_command_module_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "absent", cli.Command("sglite.cli.absent", "not there"))
    assert run("absent") == 1
    assert "no 'absent' command" in capsys.readouterr().err
    assert run("--help") == 0
    assert "absent" not in capsys.readouterr().out
