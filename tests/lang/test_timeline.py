"""What happened when, as a page, as JSON and as Chrome's trace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sglite as sgl
from sglite.protocol import Timing
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


class TimedClient(ScriptedClient):
    """Says where the time went, as an engine does."""

    async def stream_request(self, request: Any) -> Any:
        async for output in super().stream_request(request):
            timing = Timing(arrived=5.0, admitted=5.004, finished=5.02, steps=7, step_s=0.01)
            yield msgspec.structs.replace(output, timing=timing if output.finished else None)


def test_a_call_tells_how_long_the_engine_let_it_wait_and_computed(tmp_path: Path) -> None:
    state = program.run(backend=TimedClient(["word", "one", "two"], delay_s=0.02), trace=True)
    calls = {s["name"]: s for s in state.timeline.to_dict()["spans"] if s["kind"] == "gen"}
    assert calls["x"]["queued"] == pytest.approx(0.004)
    assert (calls["x"]["computed"], calls["x"]["steps"]) == (0.01, 7)
    events = json.loads(state.timeline.write(tmp_path / "run.trace.json").read_text())["traceEvents"]
    whole = next(e for e in events if e["name"] == "gen x")
    parts = [e for e in events if e.get("cat") == "engine" and e["tid"] == 0]
    assert [e["name"] for e in parts] == ["queue", "7 steps"]
    assert all(whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 2 for e in parts)
    assert whole["args"]["queued_s"] == pytest.approx(0.004)


def test_the_page_holds_everything_and_model_text_cannot_leave_its_place(state: Any, tmp_path: Path) -> None:
    state.sync()
    page = state.timeline.write(tmp_path / "run.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["name"] == "program"
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("</script>") == 2


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHECKS = """
const bad = [];
if (document.documentElement.scrollWidth > innerWidth) bad.push("wider than the window");
const text = document.body.innerText;
for (const word of ["generation", "states", "prompt tokens"]) if (!text.includes(word)) bad.push("no " + word);
for (const button of document.querySelectorAll("button.span.gen")) {
  const box = button.getBoundingClientRect();
  if (box.width < 3 || box.height < 12 || box.right > innerWidth + 1) bad.push("a call of " + box.width);
}
document.querySelector("button.span.gen").click();
const detail = document.querySelector(".detail");
if (!detail || detail.getBoundingClientRect().right > innerWidth + 1) bad.push("no detail");
if (parseFloat(getComputedStyle(document.body).fontSize) < 13) bad.push("small letters");
document.title = "checked: " + (bad.join("; ") || "all is well");
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_a_complaint(tmp_path: Path, width: int) -> None:
    state = program.run(backend=TimedClient(["word", "</script><b>", "two"], delay_s=0.02), trace=True)
    page = state.timeline.write(tmp_path / "run.html")
    # a frame of that width: a headless window itself is never narrower than 500 pixels
    checked = page.read_text().replace(
        "</body>", f"<script>{{{CHECKS}}}parent.postMessage(document.title, '*')</script></body>"
    )
    (tmp_path / "checked.html").write_text(checked)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="checked.html" width="{width}" height="900"></iframe>'
        "<script>addEventListener('message', e => {document.title = e.data})</script>"
    )
    assert BROWSER is not None
    shown = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--virtual-time-budget=3000", "--window-size=1400,1000", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    assert "<title>checked: all is well</title>" in shown.stdout, shown.stdout[:300]


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
