"""`sglite bench`: how fast an engine is, and how fast the machine would let it be."""

from __future__ import annotations

import json
from pathlib import Path

import typer

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def offline(
    model: str = typer.Option(..., "--model", help="A known name, a folder, a GGUF file or a hub id."),
    workloads: str = typer.Option(
        "start,first_json,free_1,free_32,free_256,fork64_8k,prefill_16x4k,json_1,json_32,json_256",
        "--workloads",
        help="Comma-separated: free_N, json_N, fork64_8k, prefill_16x4k, start, first_json.",
    ),
    load_format: str = typer.Option("auto", "--load-format", help="'dummy' makes random weights from config.json."),
    out: Path | None = typer.Option(None, "--out", help="Write the report, with every single run, as JSON."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs; the median counts."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    dtype: str = typer.Option("auto", "--dtype", help="Type of weights and activations."),
    max_rows: int = typer.Option(256, "--max-rows", help="Completions that run at the same time."),
) -> None:
    """Run workloads in this process and compare each with the floor that the machine's own rates set."""
    from sglite.bench import offline as bench  # torch takes a moment to load
    from sglite.runtime.config import EngineConfig

    config = EngineConfig(model=model, load_format=load_format, device=device, dtype=dtype, max_rows=max_rows)
    report = bench.run(workloads.split(","), config, repeat=repeat, note=lambda text: print(text, flush=True))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")


@app.command()
def plot(
    reports: list[Path] = typer.Argument(..., help="Reports of `sglite bench offline`."),
    out: Path = typer.Option(..., "--out", help="The PNG to write."),
) -> None:
    """Draw reports as one picture."""
    from sglite.bench.plot import plot as draw

    draw(reports, out)
