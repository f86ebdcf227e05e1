"""What a program did and when: for people as one HTML page, for tools as JSON and as Chrome's trace format (Perfetto).

state = program.run(..., trace=True)
state.timeline.write("run.html")        # or .json, or .trace.json for ui.perfetto.dev
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglite.protocol import Usage

Kind = Literal["gen", "select", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time. Times are seconds from the start of the program.

    gen, select: from the moment the state came to it to its answer; `first` is the first piece of the answer (None
    where it came at once). Of that time the engine let it wait for `queued` seconds and computed it for `computed`, in
    `steps` steps; None where the backend does not say. wait: the program's code waited for a variable.
    """

    kind: Kind
    name: str | None
    branch: int  # 0 is the program's own state
    step: int
    start: float
    end: float
    first: float | None = None
    queued: float | None = None
    computed: float | None = None
    steps: int | None = None
    text: str = ""
    usage: Usage = Usage()
    finish: str | None = None  # why it ended
    constraint: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """A state. `parent` and `start`: which fork it began at, when."""

    branch: int
    parent: int | None
    start: float


@dataclass(eq=False)
class Timeline:
    """Filled from several threads while the program runs."""

    name: str
    began: float = field(default_factory=time.monotonic)
    spans: list[Span] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> float:
        return time.monotonic() - self.began

    def add(self, span: Span) -> None:
        with self._lock:
            self.spans.append(span)

    def new_lane(self, parent: int | None) -> int:
        with self._lock:
            self.lanes.append(Lane(len(self.lanes), parent, self.now()))
            return len(self.lanes) - 1

    @contextmanager
    def waiting(self, name: str, branch: int) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.add(Span(kind="wait", name=name, branch=branch, step=-1, start=start, end=self.now()))

    def to_dict(self) -> dict[str, Any]:
        spans = sorted(self.spans, key=lambda span: (span.branch, span.start))
        return {
            "name": self.name,
            "seconds": max((span.end for span in spans), default=0.0),
            "lanes": [asdict(lane) for lane in self.lanes],
            "spans": [{**asdict(s), "usage": {f: getattr(s.usage, f) for f in Usage.__struct_fields__}} for s in spans],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def to_chrome(self) -> str:
        """Chrome's trace event format: microseconds, a thread for each state."""
        return json.dumps({"traceEvents": chrome_events(self, process=1)}, ensure_ascii=False)

    def to_html(self) -> str:
        return html_page([self])

    def write(self, path: str | Path) -> Path:
        """`.html`, `.trace.json` (Chrome's format) or `.json` by the name's end."""
        return write_timelines([self], path)


def chrome_events(timeline: Timeline, *, process: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": timeline.name}}
    ]
    for lane in timeline.lanes:
        label = "program" if lane.parent is None else f"fork {lane.branch} of {lane.parent}"
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": lane.branch, "args": {"name": label}})
    for span in timeline.spans:
        usage = span.usage
        events += _parts(span, process=process)
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind} {span.name or ''}".strip(),
                "cat": span.kind,
                "pid": process,
                # the code's waiting lies over what is waited for: a track of its own
                "tid": span.branch if span.kind != "wait" else 10_000 + span.branch,
                "ts": round(span.start * 1e6),
                "dur": round((span.end - span.start) * 1e6),
                "args": {
                    "text": span.text,
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": usage.cached_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "forced_tokens": usage.forced_tokens,
                    "queued_s": span.queued,
                    "computed_s": span.computed,
                    "steps": span.steps,
                    "finish": span.finish,
                    "error": span.error,
                },
            }
        )
    return events


def _parts(span: Span, *, process: int) -> list[dict[str, Any]]:
    """Slices within a call's slice: waiting for a row, and the engine's steps. The engine's clock is another one, so
    they stand at the end of the call, where its answer came."""
    if span.queued is None or span.computed is None:
        return []
    begin = max(span.start, span.end - span.queued - span.computed)
    parts = (("queue", begin, span.queued), (f"{span.steps} steps", begin + span.queued, span.computed))
    return [
        {
            "ph": "X",
            "name": name,
            "cat": "engine",
            "pid": process,
            "tid": span.branch,
            "ts": round(start * 1e6),
            "dur": round(max(0.0, min(seconds, span.end - start)) * 1e6),
            "args": {},
        }
        for name, start, seconds in parts
        if seconds > 0
    ]


def html_page(timelines: list[Timeline]) -> str:
    """One page with everything in it: no request leaves it."""
    template = Path(__file__).with_name("timeline.html").read_text(encoding="utf-8")
    data = json.dumps([t.to_dict() for t in timelines], ensure_ascii=False)
    # The one sequence that could end the script element early.
    return template.replace("__DATA__", data.replace("<", "\\u003c"))


def write_timelines(timelines: list[Timeline], path: str | Path) -> Path:
    target = Path(path)
    if target.name.endswith(".trace.json"):
        events = [e for i, t in enumerate(timelines) for e in chrome_events(t, process=i + 1)]
        target.write_text(json.dumps({"traceEvents": events}, ensure_ascii=False), encoding="utf-8")
    elif target.suffix == ".json":
        data = [t.to_dict() for t in timelines]
        target.write_text(json.dumps(data[0] if len(data) == 1 else data, ensure_ascii=False), encoding="utf-8")
    else:
        target.write_text(html_page(timelines), encoding="utf-8")
    return target
