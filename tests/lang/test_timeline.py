"""What happened when, as a page, as JSON and as Chrome's trace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from tests.fakes.client import ScriptedClient


@sgl.function
def program(s: Any) -> None:
    s += "a:" + sgl.gen("x", regex="[a-z]+")
    forks = s.fork(2)
    forks += sgl.gen("y")
    forks.join()
    s += sgl.select("z", ["p", "q"])
    assert s["z"]


@pytest.fixture
def state() -> Any:
    client = ScriptedClient(["word", "</script><b>", "two"], delay_s=0.01)
    return program.run(backend=client, trace=True, stream=True)


def test_every_call_is_there_with_its_times(state: Any) -> None:
    state.sync()
    found = state.timeline.to_dict()
    calls = [span for span in found["spans"] if span["kind"] != "wait"]
    assert sorted((s["kind"], s["name"], s["branch"]) for s in calls) == [
        ("gen", "x", 0),
        ("gen", "y", 1),
        ("gen", "y", 2),
        ("select", "z", 0),
    ]
    assert [(lane["branch"], lane["parent"]) for lane in found["lanes"]] == [(0, None), (1, 0), (2, 0)]
    first = next(s for s in calls if s["name"] == "x")
    assert first["text"] == "word"
    assert first["usage"]["completion_tokens"] == 5
    assert (first["constraint"], first["finish"], first["error"]) == ("regex", "stop", None)
    assert 0 <= first["start"] < first["first"] <= first["end"] <= found["seconds"]
    assert any(s["kind"] == "wait" and s["name"] == "z" for s in found["spans"])


def test_the_page_holds_everything_and_model_text_cannot_leave_its_place(state: Any, tmp_path: Path) -> None:
    state.sync()
    page = state.timeline.write(tmp_path / "run.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["name"] == "program"
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("</script>") == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_a_complaint(state: Any, tmp_path: Path, width: int) -> None:
    state.sync()
    page = state.timeline.write(tmp_path / "run.html")
    shown = subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--window-size={width},900", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count('class="span gen"') == 3


def test_chromes_format(state: Any, tmp_path: Path) -> None:
    state.sync()
    events = json.loads(state.timeline.write(tmp_path / "run.trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert json.loads(state.timeline.write(tmp_path / "run.json").read_text()) == state.timeline.to_dict()


def test_an_error_is_in_its_place() -> None:
    client = ScriptedClient([sgl.GrammarTimeout("too slow")])
    state = program.run(backend=client, trace=True, stream=True)
    assert state.error() is not None
    (span,) = state.timeline.spans
    assert span.error == "GrammarTimeout: too slow"


def test_nothing_is_recorded_unless_asked() -> None:
    assert program.run(backend=ScriptedClient(["word"])).timeline is None
