"""`sglite bench`: how fast an engine is, and how fast the machine would let it be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from sglite.runtime.device.threads import limit_spinning

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def offline(
    model: str = typer.Option(..., "--model", help="A known name, a folder, a GGUF file or a hub id."),
    workloads: str = typer.Option(
        "start,first_json,free_1,free_32,free_256,fork64_8k,prefill_16x4k,json_1,json_32,json_256",
        "--workloads",
        help="Comma-separated: free_N, json_N, forkN_Pk, prefill_16x4k, start, first_json.",
    ),
    load_format: str = typer.Option("auto", "--load-format", help="'dummy' makes random weights from config.json."),
    out: Path | None = typer.Option(None, "--out", help="Write the report, with every single run, as JSON."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs; the median counts."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    dtype: str = typer.Option("auto", "--dtype", help="Type of weights and activations."),
    max_rows: int = typer.Option(256, "--max-rows", help="Completions that run at the same time."),
    tree_attention: bool = typer.Option(True, help="On a GPU, read a prefix that rows share once for all of them."),
    deterministic: bool = typer.Option(False, "--deterministic", help="The kernels whose bits depend on no batch."),
) -> None:
    """Run workloads in this process and compare each with the floor that the machine's own rates set."""
    limit_spinning()
    from sglite.bench import offline as bench  # torch takes a moment to load
    from sglite.runtime.config import EngineConfig

    config = EngineConfig(
        model=model,
        load_format=load_format,
        device=device,
        dtype=dtype,
        max_rows=max_rows,
        tree_attention=tree_attention,
        deterministic=deterministic,
    )
    report = bench.run(workloads.split(","), config, repeat=repeat, note=lambda text: print(text, flush=True))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if report.failed:
        raise typer.Exit(1)


@app.command()
def structured(
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    cases: str = typer.Option(
        "mix0_32,mix20_32,mix50_32,mix100_32,extract_1,extract_32,keys_1,keys_32,calls_1,calls_32,strings_32,deep_32,untuned_32",
        "--cases",
        help="Comma-separated: mixP_N (P % of N rows constrained), extract_N, keys_N, calls_N, strings_N, deep_N, "
        "untuned_N.",
    ),
    ways: str = typer.Option(
        "free,cold,warm,nojump,random",
        "--ways",
        help="Comma-separated: free, cold, warm (knows the schema), nojump (warm, forced text drawn), random (t = 1).",
    ),
    bystander: bool = typer.Option(True, "--bystander/--no-bystander", help="Streams beside cold hostile schemas."),
    real: bool = typer.Option(False, "--real", help="With real weights: validate outputs, measure prompt lookup."),
    streams: int = typer.Option(32, "--streams", min=1, help="Free streams of the bystander test."),
    load_format: str = typer.Option("auto", "--load-format", help="'dummy' makes random weights from config.json."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    dtype: str = typer.Option("auto", "--dtype", help="Type of weights and activations."),
    max_rows: int = typer.Option(256, "--max-rows", help="Completions that run at the same time."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs; the median counts."),
    out: Path | None = typer.Option(None, "--out", help="Write the report as JSON."),
) -> None:
    """What constraints cost and what forced text gains: mixes, extraction, calls, long strings, bystanders."""
    limit_spinning()
    from sglite.bench.structured import run as bench  # torch takes a moment to load
    from sglite.bench.structured import whole
    from sglite.runtime.config import EngineConfig

    known = {
        "free": bench.Way(free=True),
        "cold": bench.Way(),
        "warm": bench.Way(warm=True),
        "nojump": bench.Way(warm=True, jump=False),
        "random": bench.Way(temperature=1.0),
    }
    unknown = [way for way in ways.split(",") if way not in known]
    if unknown:
        raise typer.BadParameter(f"no way {unknown[0]!r}; there are {', '.join(known)}")
    config = EngineConfig(model=model, load_format=load_format, device=device, dtype=dtype, max_rows=max_rows)
    parts = whole.parts(
        config,
        [name for name in cases.split(",") if name],
        [known[way] for way in ways.split(",")],
        with_bystander=bystander,
        with_real=real,
        streams=streams,
        repeat=repeat,
        note=lambda text: print(text, flush=True),
    )

    def write(report: dict[str, Any]) -> None:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    whole.measure(parts, write)


@app.command()
def plot(
    reports: list[Path] = typer.Argument(..., help="Reports of `sglite bench offline`."),
    out: Path = typer.Option(..., "--out", help="The PNG to write."),
) -> None:
    """Draw reports as one picture."""
    from sglite.bench.plot import plot as draw

    draw(reports, out)


@app.command()
def cpu(
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    out: Path | None = typer.Option(None, "--out", help="Write the numbers as JSON."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs; the median counts."),
) -> None:
    """Compare with transformers' generate on this CPU: one row, shared prefixes, a tree of thought, start, memory."""
    limit_spinning()
    from sglite.bench.cpu import run  # torch takes a moment to load

    report = run(model, repeat=repeat, note=lambda text: print(text, flush=True))
    print(json.dumps(report["numbers"], indent=1))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@app.command()
def serve(
    url: str | None = typer.Option(None, "--url", help="Measure this OpenAI-compatible API (…/v1), whatever runs it."),
    compare: str | None = typer.Option(
        None, "--compare", help="'transformers': against naive servers, on this machine."
    ),
    model: str = typer.Option("smollm2", "--model", help="What the started servers serve, or the name sent to --url."),
    device: str = typer.Option("cpu", "--device", help="Of the server that is started for --compare."),
    users: int = typer.Option(50, "--users", min=1, help="Users at once."),
    requests: int = typer.Option(50, "--requests", min=1, help="Requests in all."),
    prompt_words: int = typer.Option(64, "--prompt-words", min=1, help="Words of a prompt (about 1.3 tokens each)."),
    shared_words: int = typer.Option(0, "--shared-words", min=0, help="Of those, the same for every request."),
    max_tokens: int = typer.Option(32, "--max-tokens", min=1, help="Output tokens of a request, at most."),
    rate: float = typer.Option(0.0, "--rate", min=0.0, help="Requests a second, Poisson; 0: as fast as users allow."),
    api_key: str = typer.Option("none", "--api-key", help="Sent to --url."),
    out: Path | None = typer.Option(None, "--out", help="Write the numbers as JSON; a picture goes beside it."),
) -> None:
    """Many users at once against a server: time to the first token, between tokens, throughput, failures."""
    from sglite.bench import serve as bench  # brings a client and, to compare, transformers in

    load = bench.Load(
        users=users, requests=requests, prompt_words=prompt_words, shared_words=shared_words, max_tokens=max_tokens,
        rate=rate, model=model,
    )  # fmt: skip
    bench.main(load, url=url, compare_with=compare, device=device, api_key=api_key, out=out)


@app.command()
def programs(
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    workloads: str = typer.Option(
        "tree_of_thought,skeleton_of_thought,llm_judge,mmlu,hellaswag,react,multi_turn_chat,multi_document_qa,rag_json",
        "--workloads",
        help="Comma-separated, in this order.",
    ),
    at_once: str = typer.Option("1,4,16,64", "--at-once", help="Comma-separated: programs that run at the same time."),
    pools: str = typer.Option("", "--pools", help="Run react again with KV for these shares of its need: 1,0.5,0.25."),
    scale: float = typer.Option(1.0, "--scale", min=0.01, help="Multiplies the lengths of texts and answers."),
    pause_scale: float = typer.Option(1.0, "--pause-scale", min=0.0, help="Multiplies the pauses of tools."),
    share: float = typer.Option(1.0, "--share", min=0.0, max=1.0, help="Of the questions of mmlu and hellaswag."),
    load_format: str = typer.Option("auto", "--load-format", help="'dummy' makes random weights from config.json."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    dtype: str = typer.Option("auto", "--dtype", help="Type of weights and activations."),
    max_rows: int = typer.Option(256, "--max-rows", help="Completions that run at the same time."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs of each way; the median counts."),
    process: bool = typer.Option(False, "--process", help="Run the engine in a process of its own."),
    server: bool = typer.Option(
        False, "--server", help="Against a server that is started for it: programs over HTTP, calls over HTTP."
    ),
    ways: str = typer.Option("", "--ways", help="Comma-separated: calls, or with --server text and ids; all of them."),
    warm: bool = typer.Option(True, "--warm/--no-warm", help="One unmeasured run of each way before."),
    out: Path | None = typer.Option(None, "--out", help="Write the report as JSON; the table goes beside it (.md)."),
) -> None:
    """Run programs, and the same work as loose calls, on one engine: time, hits, admissions, and what was needed.

    With --server the engine is behind `sglite serve`'s application in a process of its own. Three ways are compared
    there: programs through a RuntimeEndpoint, calls as an OpenAI client makes them (text), and calls as token ids.
    """
    limit_spinning()
    from sglite.bench.programs import run as bench  # torch takes a moment to load
    from sglite.bench.programs.shapes import Shape
    from sglite.runtime.config import EngineConfig

    config = EngineConfig(model=model, load_format=load_format, device=device, dtype=dtype, max_rows=max_rows)
    shape = Shape(scale=scale, pause_scale=pause_scale, share=share)
    made = bench.Bench(
        config,
        shape,
        repeat=repeat,
        warm=warm,
        process=process,
        served=server,
        ways=[way for way in ways.split(",") if way],
        note=lambda text: print(text, flush=True),
    )
    numbers = [int(number) for number in at_once.split(",")]
    report = made.run(workloads.split(","), numbers, [float(pool) for pool in pools.split(",") if pool])
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(bench.table(report) + "\n", encoding="utf-8")
