"""`sglite batch`, over a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglite import cli
from tests.fakes.core import scripted_engine


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A request, one that is refused, and a line that is none."""
    monkeypatch.setattr("sglite.runtime.async_engine.Engine", lambda config: scripted_engine())
    bodies: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "a", "temperature": -1}]
    lines = [json.dumps({"custom_id": f"r{i}", "url": "/v1/completions", "body": b}) for i, b in enumerate(bodies)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*lines, "no request"]))
    return path


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", *arguments])
    return int(ended.value.code or 0)


def test_lines_with_errors_are_counted_and_fail_the_command_where_asked(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(source.with_name("out.jsonl"))
    assert status(str(source), target) == 0
    assert "3 answered, 2 of them with an error (1 lines are no requests), 0 from before" in capsys.readouterr().err
    assert status(str(source), target, "--strict") == 3  # what an earlier run answered counts
    assert "3 from before (2 of them with an error)" in capsys.readouterr().err


def test_a_file_that_is_answered_whole_is_status_0(source: Path) -> None:
    source.write_text(source.read_text().splitlines()[0])
    assert status(str(source), str(source.with_name("out.jsonl")), "--strict") == 0
