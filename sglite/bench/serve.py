"""`sglite bench serve`: many users at once against an OpenAI-compatible URL, or against servers that it starts itself.

Question: what does a user wait for, and what does the machine get done? Measured at the client over streams:

    TTFT   from sending the request to the first text, seconds
    TPOT   (last text - first text) / (output tokens - 1), seconds
    ITL    between two pieces of text, seconds
    E2E    from sending to the end, seconds

`--compare transformers` starts three servers one after the other on this machine, with the same model in float32:
sglite, a naive one (FastAPI and `generate` under a lock, KV cache on) and one that pads what waits to a static batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx

from sglite.errors import BackendError, InvalidRequest

_WORDS = (
    "river", "stone", "garden", "window", "paper", "music", "winter", "market", "engine", "letter", "forest", "bridge",
    "silver", "morning", "captain", "kitchen", "island", "mirror", "summer", "lantern", "harbor", "meadow", "thunder",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    users: int = 50  # at once
    requests: int = 50  # in all
    prompt_words: int = 64  # a word is about 1.3 tokens
    shared_words: int = 0  # of those, the same for all
    max_tokens: int = 32
    rate: float = 0.0  # requests a second, Poisson; 0: as fast as `users` allow
    seed: int = 0
    model: str = "default"
    timeout_s: float = 3600.0


@dataclass(slots=True)
class Sample:
    """What one request saw, in seconds."""

    ttft: float | None = None
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        if self.ttft is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)


@dataclass(slots=True)
class Report:
    name: str
    seconds: float
    requests: int
    failed: int
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    percentiles: dict[str, dict[str, float]]  # metric -> {"mean", "p50", "p90", "p99"} in seconds
    kv_use: float | None = None  # of the KV memory in use at the peak, the share that holds tokens of requests
    note: str = ""
    errors: list[str] = field(default_factory=list)


async def measure(url: str, load: Load, *, name: str, api_key: str = "none") -> Report:
    """Run the load against URL (…/v1). A failed request is counted, not raised."""
    prompts = make_prompts(load)
    samples: list[Sample] = []
    waiting = iter(range(load.requests))
    dice = random.Random(load.seed)
    started = time.perf_counter()
    arrivals = _arrivals(load, dice)

    async with httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=load.timeout_s,
        headers={"authorization": f"Bearer {api_key}"},
        limits=httpx.Limits(max_connections=load.users, max_keepalive_connections=load.users),
    ) as client:

        async def user() -> None:
            for number in waiting:
                await asyncio.sleep(max(0.0, arrivals[number] - (time.perf_counter() - started)))
                samples.append(await _one(client, prompts[number], load))

        await asyncio.gather(*(user() for _ in range(load.users)))
    return summarise(name, samples, time.perf_counter() - started)


def summarise(name: str, samples: Sequence[Sample], seconds: float) -> Report:
    good = [sample for sample in samples if not sample.error]
    tokens = sum(sample.tokens for sample in good)
    values: dict[str, list[float]] = {
        "ttft": [s.ttft for s in good if s.ttft is not None],
        "tpot": [s.tpot for s in good if s.tpot is not None],
        "itl": [gap for s in good for gap in s.gaps],
        "e2e": [s.e2e for s in good],
    }
    return Report(
        name=name,
        seconds=seconds,
        requests=len(samples),
        failed=len(samples) - len(good),
        output_tokens=tokens,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        percentiles={metric: _percentiles(found) for metric, found in values.items() if found},
        errors=sorted({sample.error for sample in samples if sample.error})[:5],
    )


def make_prompts(load: Load) -> list[str]:
    """Different for every request after the shared words, and the same for every run of one seed."""
    dice = random.Random(load.seed)
    shared = [dice.choice(_WORDS) for _ in range(load.shared_words)]
    own = max(1, load.prompt_words - load.shared_words)
    return [" ".join([*shared, *(dice.choice(_WORDS) for _ in range(own))]) for _ in range(load.requests)]


def table(reports: Sequence[Report]) -> str:
    """GitHub's Markdown."""
    head = "| server | tok/s | req/s | TTFT p50 / p99 s | TPOT p50 / p99 ms | E2E p50 / p99 s | failed | KV use |"
    lines = [head, "| --- " * 8 + "|"]
    for report in reports:
        kv = "" if report.kv_use is None else f"{report.kv_use:.0%}"
        cells = [
            report.name,
            f"{report.tokens_per_s:.1f}",
            f"{report.requests_per_s:.2f}",
            _pair(report, "ttft", 1.0),
            _pair(report, "tpot", 1000.0),
            _pair(report, "e2e", 1.0),
            f"{report.failed}/{report.requests}",
            kv,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(reports: Sequence[Report], out: Path) -> None:
    """Throughput, TTFT and TPOT side by side. Raises InvalidRequest without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise InvalidRequest("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8))
    names = [report.name for report in reports]
    panels = (
        ("output tokens/s", [r.tokens_per_s for r in reports]),
        ("TTFT p50, s", [r.percentiles.get("ttft", {}).get("p50", 0.0) for r in reports]),
        ("TPOT p50, ms", [1000 * r.percentiles.get("tpot", {}).get("p50", 0.0) for r in reports]),
    )
    for axis, (title, values) in zip(axes, panels, strict=True):
        bars = axis.bar(names, values, color=["#4c78a8", "#e45756", "#f58518"][: len(names)])
        axis.bar_label(bars, labels=[f"{value:,.3g}" for value in values])
        axis.set_title(title)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def compare(model: str, load: Load, *, device: str, note: Any = print) -> list[Report]:
    """The same load against sglite and the two naive servers, one after the other."""
    reports: list[Report] = []
    with served(["-c", "from sglite.cli import main; main()", "serve", "--model", model, "--device", device,
                 "--port", "0", "--no-log-requests"]) as url:  # fmt: skip
        reports.append(asyncio.run(_with_kv_use(url, load)))
        note(table(reports))
    for mode in ("lock", "static"):
        with served(["-m", "sglite.bench.naive_server", "--model", model, "--mode", mode, "--port", "0"]) as url:
            report = asyncio.run(_warm_and_measure(url, load, name=f"transformers, {mode}"))
            report.kv_use = httpx.get(f"{url}/kv_use", timeout=60).json()["kv_use"]
            reports.append(report)
            note(table(reports))
    reports[
        0
    ].note = f"{reports[0].tokens_per_s / reports[1].tokens_per_s:.1f}x the throughput of generate under a lock"
    return reports


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[str]:
    """A server process until the end of the block; gives its URL, which it prints when it is ready."""
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield _url_of(process.stderr)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    import torch
    import transformers

    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": list(os.getloadavg()),
    }


def as_json(reports: Sequence[Report], load: Load, facts: dict[str, Any]) -> str:
    return json.dumps({"environment": facts, "load": asdict(load), "reports": [asdict(r) for r in reports]}, indent=1)


async def _one(client: httpx.AsyncClient, prompt: str, load: Load) -> Sample:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample()
    begun = last = time.perf_counter()
    try:
        async with client.stream("POST", "/completions", json=body) as response:
            if response.status_code != 200:
                sample.error = f"HTTP {response.status_code}"
                return sample
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    sample.tokens = event["usage"]["completion_tokens"]
                if not any(choice.get("text") for choice in event.get("choices") or ()):
                    continue
                now = time.perf_counter()
                if sample.ttft is None:
                    sample.ttft = now - begun
                else:
                    sample.gaps.append(now - last)
                last = now
    except httpx.HTTPError as error:
        sample.error = type(error).__name__
    sample.e2e = last - begun
    sample.tokens = sample.tokens or (1 + len(sample.gaps) if sample.ttft is not None else 0)
    return sample


async def _warm_and_measure(url: str, load: Load, *, name: str) -> Report:
    users = min(load.users, 8)
    warm = replace(load, users=users, requests=users, max_tokens=4, rate=0.0, seed=load.seed + 1)
    await measure(f"{url}/v1", warm, name="warm-up")
    return await measure(f"{url}/v1", load, name=name)


async def _with_kv_use(url: str, load: Load) -> Report:
    """sglite's pages hold tokens or are free; what holds none although it is taken would be the waste."""
    peaks: list[float] = []

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            while True:
                stats = (await client.get(f"{url}/get_server_info")).json()["stats"]
                # {} where the engine had no moment to answer
                taken = stats.get("pages_total", 0) - stats.get("pages_free", 0)
                if taken:
                    held = stats["pages_cached"] + stats["pages_protected"] + stats["pages_owned"]
                    peaks.append(min(1.0, held / taken))
                await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    try:
        report = await _warm_and_measure(url, load, name="sglite")
    finally:
        watching.cancel()
    report.kv_use = sum(peaks) / len(peaks) if peaks else None
    return report


def _url_of(stderr: IO[str]) -> str:
    for line in stderr:
        found = re.search(r"http://[0-9.:]+", line)
        if found:
            return found[0]
    raise BackendError("the server ended before it was ready")


def _arrivals(load: Load, dice: random.Random) -> list[float]:
    """When each request is sent, in seconds from the start."""
    if not load.rate:
        return [0.0] * load.requests
    at, found = 0.0, []
    for _ in range(load.requests):
        found.append(at)
        at += dice.expovariate(load.rate)
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"mean": sum(ordered) / len(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def _pair(report: Report, metric: str, scale: float) -> str:
    found = report.percentiles.get(metric)
    return "" if found is None else f"{scale * found['p50']:.3g} / {scale * found['p99']:.3g}"


def main(load: Load, *, url: str | None, compare_with: str | None, device: str, api_key: str, out: Path | None) -> None:
    """The command: measure, print a table and one JSON line, write JSON and a picture. Raises InvalidRequest."""
    if (url is None) == (compare_with is None):
        raise InvalidRequest("give either --url or --compare transformers")
    if compare_with not in (None, "transformers"):
        raise InvalidRequest(f"--compare knows 'transformers', not {compare_with!r}", param="compare")
    if url is not None:
        facts: dict[str, Any] = {"url": url}
        reports = [asyncio.run(measure(url, load, name=url, api_key=api_key))]
    else:
        facts = environment()
        reports = compare(load.model, load, device=device)
    print(table(reports))
    text = as_json(reports, load, facts)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
        plot(reports, out.with_suffix(".png"))
    print(json.dumps(json.loads(text)))
