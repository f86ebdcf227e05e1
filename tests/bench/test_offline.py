from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from sglite.bench import offline
from sglite.runtime.config import EngineConfig


def test_a_start_that_fails_is_told_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([(0, {"start": 3.0, "first_json": 0.1}, ""), (1, None, "Traceback\nno memory"), (1, None, "")])

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        status, found, words = next(ends)
        return subprocess.CompletedProcess(command, status, json.dumps(found), words)

    monkeypatch.setattr("sglite.bench.offline.versions", dict)
    monkeypatch.setattr("sglite.bench.offline.subprocess.run", run)
    notes: list[str] = []
    report = offline.run(["start", "first_json"], EngineConfig(model="m"), repeat=3, note=notes.append)
    assert [(row.name, row.seconds, row.runs) for row in report.rows] == [
        ("start", 3.0, [3.0]),
        ("first_json", 0.1, [0.1]),
    ]
    assert report.failed == ["no memory", "exit status 1"]
    assert notes[-2:] == ["start failed: no memory", "start failed: exit status 1"]
