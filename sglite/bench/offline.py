"""`sglite bench offline`: workloads through one in-process Engine, against the floor of the machine it runs on.

Steps: starts of an engine, each in a process of its own; calibrate; one engine for the other workloads, each run once
unmeasured (kernels and graphs of its shapes are made) and then `repeat` times. Times are wall-clock times of the whole
call. Numbers are medians; all single runs are in the report.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sglite import bytecode
from sglite._version import __version__
from sglite.bench.calibrate import Rates, calibrate
from sglite.bench.floors import ModelCost, floor_seconds
from sglite.bench.workloads import SCHEMA, Workload, workload
from sglite.protocol import GrammarSpec, SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.models.config import ModelConfig

DEFAULT_WORKLOADS = "start,first_json,free_1,free_32,free_256,fork64_8k,prefill_16x4k,json_1,json_32,json_256"
_COUNTED = (
    "steps",
    "retractions",
    "forced_tokens",
    "cached_tokens",
    "stale_tokens",
    "late_tokens",
    "held_token_steps",
    "computed_token_steps",
    "schedule_s",
    "forward_s",
    "mask_s",
    "sample_s",
    "wait_s",
    "apply_s",
)  # of the engine's statistics, per run
_STARTS = ("start", "first_json")  # measured on engines of their own


@dataclass
class Row:
    """One workload's result. `rate` is output tokens per second; None where only the time counts."""

    name: str
    seconds: float
    runs: list[float]
    rate: float | None = None
    floor_seconds: float | None = None
    share_of_floor: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    model: str
    versions: dict[str, str]
    device: str
    rates: Rates | None = None
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # starts that ended with an error, and with which

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(names: Sequence[str], config: EngineConfig, *, repeat: int, note: Callable[[str], None]) -> Report:
    """`note` gets a line per result. Raises InvalidRequest for an unknown workload before anything is measured."""
    loads = [workload(name) for name in names if name not in _STARTS]
    report = Report(Path(config.model).name, versions(), "")
    if set(names) & set(_STARTS):
        starts = [start for _ in range(repeat) if (start := _start(config, report.failed)) is not None]
        for name in (name for name in _STARTS if name in names and starts):
            report.rows.append(_timed(name, [start[name] for start in starts]))
            note(line(report.rows[-1]))
        for failure in report.failed:
            note(f"start failed: {failure}")
    if not loads:
        return report
    with Engine(config=config) as engine:
        device, dtype = placement(config)
        report.device = device_name(device)
        report.rates = calibrate(device, dtype)
        copy, matmul = report.rates.copy / 1e12, report.rates.matmul / 1e12
        note(f"{report.device}: copy {copy:.2f} TB/s, matmul {matmul:.0f} TFLOP/s")
        cost = ModelCost.of(model_config(config), dtype.itemsize)
        for load in loads:
            row = measure(engine, load, repeat=repeat)
            row.floor_seconds = floor_seconds(load, cost, report.rates)
            row.share_of_floor = row.floor_seconds / row.seconds
            report.rows.append(row)
            note(line(row))
    return report


def measure(engine: Engine, load: Workload, *, repeat: int) -> Row:
    """One unmeasured run, then `repeat` measured ones."""
    runs: list[float] = []
    before: dict[str, Any] = {}
    for i in range(repeat + 1):
        if i == 1:
            before = engine.stats()
        seconds = run_once(engine, load, seed=i)
        if i:
            runs.append(seconds)
    after = engine.stats()
    row = _timed(load.name, runs)
    if load.output > 1:
        row.rate = load.rows * load.output / row.seconds
    row.details = {name: (after[name] - before[name]) / repeat for name in _COUNTED}
    if not load.prefix and row.details["held_token_steps"]:  # tokens that rows share would be counted more than once
        row.details["kv_unused"] = 1 - row.details["computed_token_steps"] / row.details["held_token_steps"]
    return row


def run_once(engine: Engine, load: Workload, *, seed: int) -> float:
    """Seconds of one call. Raises RuntimeError where an answer is shorter than asked: the time would mean nothing."""
    prefix, prompts = load.prompts(_usable_vocab(engine), seed=seed)
    if prefix:
        engine.generate(input_ids=prefix, sampling=_greedy(1))
    began = time.perf_counter()
    constraint = _schema() if load.constrained else None
    outputs = engine.generate(input_ids=prompts, sampling=_greedy(load.output), constraint=constraint)
    seconds = time.perf_counter() - began
    short = [output.usage.completion_tokens for output in outputs if output.usage.completion_tokens != load.output]
    if short:
        raise RuntimeError(f"{load.name}: {len(short)} answers have {short[0]} tokens instead of {load.output}")
    return seconds


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _schema() -> GrammarSpec:
    from sglite.grammar import spec  # the grammar engines take a moment to load

    return spec.json_schema(SCHEMA)


def _usable_vocab(engine: Engine) -> int:
    """Ids below the special tokens' usual place, which a tokenizer surely has."""
    return min(engine.model_info.vocab_size, 150_000)


def _start(config: EngineConfig, failed: list[str]) -> dict[str, float] | None:
    """In a fresh process: seconds from its start until the engine is ready, then of the first constrained request.
    None where it ended with an error, which is then the last of `failed`: other workloads are measured all the same."""
    given = {name: value for name, value in asdict(config).items() if value is not None}
    began = time.time()
    command = [sys.executable, "-m", "sglite.bench.start", json.dumps({"began": began, "config": given})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bytecode.environment())
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        failed.append((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _timed(name: str, runs: list[float]) -> Row:
    return Row(name, statistics.median(runs), runs)


def placement(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.accelerator.is_available())
    if on_cpu:
        return torch.device("cpu"), torch.float32
    name = "bfloat16" if config.dtype == "auto" else config.dtype
    return torch.device(config.device if config.device != "auto" else "cuda"), getattr(torch, name)


def model_config(config: EngineConfig) -> ModelConfig:
    from sglite.runtime.models.loader import resolve_model

    load_format = "dummy" if config.load_format == "dummy" else "auto"
    return resolve_model(config.model, load_format=load_format, tokenizer=config.tokenizer).config


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def versions() -> dict[str, str]:
    """Of this program and what its speed depends on, with the commit where it runs from a checkout."""
    found = {"sglite": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "flashinfer-python", "numpy", "llguidance", "xgrammar"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    return found


def line(row: Row) -> str:
    rate = f"{row.rate:10.0f} tok/s" if row.rate is not None else " " * 16
    share = f"  {100 * row.share_of_floor:5.1f} % of the floor" if row.share_of_floor is not None else ""
    return f"{row.name:14} {row.seconds:9.3f} s {rate}{share}"
