"""What the README shows, works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglite import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.model
def test_the_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    verdict, answer = capsys.readouterr().out.split("\n", 1)
    assert re.match(r"sentiment='(good|bad|mixed)' stars=[1-5] (price|quality|delivery)", verdict)
    assert "Paris" in answer


def test_files_and_commands_exist() -> None:
    for target in re.findall(r"\]\((\w[^)#]*)\)", README):
        assert (ROOT / target).exists(), target
    for command in re.findall(r"`sglite (\w+)", README):
        assert command in cli.COMMANDS, command
    assert set(re.findall(r"`sglite (\w+)", README)) >= set(cli.COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
