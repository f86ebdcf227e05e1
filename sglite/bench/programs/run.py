"""Runs workloads both ways, in turns, on one engine, and reports what each cost and should have cost.

Every run begins with an empty cache. The first of each way is not counted: kernels, graphs and grammars of its shapes
are made in it. `seconds` is the time from the start of the first program to the end of the last; for programs it
includes compiling (tracing, schemas, the static prefix).
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from sglite.bench.calibrate import Rates, calibrate
from sglite.bench.floors import ModelCost
from sglite.bench.offline import device_name, model_config, placement, versions
from sglite.bench.programs import price
from sglite.bench.programs.loose import Loose
from sglite.bench.programs.record import Call, Recorder, Warmed
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.workloads import Arguments, Workload, workload
from sglite.lang.bridge import program_loop
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig

Way = Literal["programs", "calls"]
WAYS: tuple[Way, ...] = ("programs", "calls")
_COUNTED = (
    "steps",
    "step_s",
    "admissions",
    "resumptions",
    "retractions",
    "computed_tokens",
    "evicted_pages",
    "schedule_s",
    "forward_s",
    "mask_s",
    "sample_s",
    "wait_s",
    "apply_s",
)


@dataclass
class Row:
    """One workload, one way, one number of programs at once. Shares and ratios are of the median run."""

    workload: str
    way: Way
    at_once: int
    pool: float | None  # KV pages as a share of what all programs together need; None: as the machine has
    programs: int
    seconds: float
    runs: list[float]
    programs_per_s: float
    hit_rate: float
    best_hit_rate: float  # of the best eviction in hindsight, in the same order
    admissions_per_branch: float
    computed: float  # tokens computed, as a multiple of the least
    over_critical_path: float
    share_of_floor: float
    distinct_tokens: int
    details: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    model: str
    versions: dict[str, str]
    device: str
    rates: Rates
    shape: Shape
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float
    calls: list[Call]
    warmed: list[Warmed]
    counts: dict[str, float]


class Bench:
    def __init__(
        self,
        config: EngineConfig,
        shape: Shape,
        *,
        repeat: int,
        warm: bool,
        process: bool,
        note: Callable[[str], None],
    ) -> None:
        """`process`: the engine has one of its own, as behind a server on a GPU."""
        self._config = config
        self._process = process
        self._shape = shape
        self._repeat = repeat
        self._warm = warm
        self._note = note

    def run(self, names: Sequence[str], at_once: Sequence[int], pools: Sequence[float]) -> Report:
        """`pools`: react is run again in KV pools of these shares of its need. Raises InvalidRequest."""
        report = self._in_ample_memory(names, at_once)
        gc.collect()  # the engine's memory is free for the next one
        if "react" in names:
            for number in at_once:
                self._in_pools(report, number, pools)
        return report

    def _in_ample_memory(self, names: Sequence[str], at_once: Sequence[int]) -> Report:
        with Engine(config=self._config, process=self._process) as engine:
            texts = Texts(engine.tokenizer, self._shape)
            loads = [(name, workload(name, texts)) for name in names]
            device, dtype = placement(self._config)
            self._cost = ModelCost.of(model_config(self._config), dtype.itemsize)
            rates = calibrate(device, dtype)
            report = Report(self._config.model, versions(), device_name(device), rates, self._shape)
            self._note(f"{report.device}: copy {rates.copy / 1e12:.3f} TB/s, matmul {rates.matmul / 1e12:.1f} TFLOP/s")
            self._note(HEAD)
            for name, load in loads:
                for number in at_once:
                    self._measure(report, engine, name, load, number, None)
        return report

    def _in_pools(self, report: Report, at_once: int, pools: Sequence[float]) -> None:
        need = max(r.distinct_tokens for r in report.rows if (r.workload, r.at_once) == ("react", at_once))
        for pool in pools:
            page = self._config.page_size
            config = replace(self._config, num_pages=int(pool * need) // page)
            self._in_pool(report, config, at_once, pool)
            gc.collect()

    def _in_pool(self, report: Report, config: EngineConfig, at_once: int, pool: float) -> None:
        with Engine(config=config, process=self._process) as engine:
            load = workload("react", Texts(engine.tokenizer, self._shape))
            self._measure(report, engine, "react", load, at_once, pool)

    def _measure(
        self, report: Report, engine: Engine, name: str, load: Workload, at_once: int, pool: float | None
    ) -> None:
        """Both ways in turns, so that what slows the machine slows both."""
        arguments = load.arguments(at_once)
        found: dict[Way, list[_Measured]] = {way: [] for way in WAYS}
        for number in range(self._repeat + self._warm):
            for way in WAYS:
                measured = run_once(engine, load, arguments, way, at_once)
                if number >= self._warm:
                    found[way].append(measured)
        for way in WAYS:
            row = self._row(report.rates, engine, name, load, arguments, way, at_once, pool, found[way])
            report.rows.append(row)
        self._note("\n".join(lines(report.rows[-2:])))

    def _row(
        self,
        rates: Rates,
        engine: Engine,
        name: str,
        load: Workload,
        arguments: list[Arguments],
        way: Way,
        at_once: int,
        pool: float | None,
        runs: list[_Measured],
    ) -> Row:
        run = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        seconds = statistics.median(r.seconds for r in runs)
        chunk = self._config.max_step_tokens or (512 if placement(self._config)[0].type == "cpu" else 8192)
        path = price.critical_path(run.calls, chunk=chunk)
        pause_s = max(map(load.pause_s, arguments))
        least = price.least_tokens(run.calls)
        pages: int = engine.facts["num_pages"] * engine.facts["page_size"]
        hit_rate, best = price.hit_rates(run.calls, run.warmed, capacity=pages)
        return Row(
            workload=name,
            way=way,
            at_once=at_once,
            pool=pool,
            programs=len(arguments),
            seconds=seconds,
            runs=[r.seconds for r in runs],
            programs_per_s=len(arguments) / seconds,
            hit_rate=hit_rate,
            best_hit_rate=best,
            admissions_per_branch=run.counts["admissions"] / (load.branches() * len(arguments)),
            computed=run.counts["computed_tokens"] / least,
            over_critical_path=run.seconds / (path.seconds + pause_s),
            share_of_floor=price.floor_seconds(run.calls, path, self._cost, rates, pause_s=pause_s) / run.seconds,
            distinct_tokens=least,
            details=run.counts | {"path_calls": path.calls, "path_steps": path.steps, "path_s": path.seconds},
        )


def run_once(engine: Engine, load: Workload, arguments: list[Arguments], way: Way, at_once: int) -> _Measured:
    loop = program_loop()
    loop.run(engine.flush_cache())
    recorder = Recorder(engine)
    before = engine.stats()
    began = time.perf_counter()
    if way == "programs":
        compiled = load.program.compile(backend=recorder)
        compiled.run_batch(arguments, num_threads=at_once)
    else:
        loop.run(_calls(recorder, load, arguments, at_once))
    seconds = time.perf_counter() - began
    after = engine.stats()
    return _Measured(seconds, recorder.calls, recorder.warmed, {name: after[name] - before[name] for name in _COUNTED})


async def _calls(recorder: Recorder, load: Workload, arguments: list[Arguments], at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with places:
            await load.calls(Loose(recorder, str(number)), **arguments[number])

    works: list[Coroutine[Any, Any, None]] = [one(number) for number in range(len(arguments))]
    await asyncio.gather(*works)


HEAD = (
    "workload            way       at once  pool   seconds  prog/s   hits  best  adm/br  computed  /path  floor  ratio"
)


def lines(pair: Sequence[Row]) -> list[str]:
    """One line for each way of a workload; the ratio is calls to programs."""
    found: list[str] = []
    for row in pair:
        pool = "" if row.pool is None else f"{row.pool:g}"
        ratio = f"{pair[-1].seconds / row.seconds:6.2f}"
        found.append(
            f"{row.workload:19} {row.way:9} {row.at_once:7} {pool:>5} {row.seconds:9.3f} {row.programs_per_s:7.2f}"
            f" {row.hit_rate:6.1%} {row.best_hit_rate:6.1%} {row.admissions_per_branch:6.2f} {row.computed:8.3f}"
            f" {row.over_critical_path:6.2f} {row.share_of_floor:6.1%} {ratio}"
        )
    return found


def table(report: Report) -> str:
    """GitHub's Markdown: a line for each workload and number of programs, programs / calls in a cell."""
    head = (
        "| workload | at once | KV pool | seconds | programs/s | ratio | hit rate | best hit rate | admissions a branch"
        " | computed / least | / critical path | of the floor |"
    )
    found = [head, "| --- " * 12 + "|"]
    for ours, loose in zip(report.rows[::2], report.rows[1::2], strict=True):
        pair = [f"{a} / {b}" for a, b in zip(_cells(ours), _cells(loose), strict=True)]
        seconds, rate, *rest = pair
        pool = "" if ours.pool is None else f"{ours.pool:g}x"
        ratio = f"{loose.seconds / ours.seconds:.2f}"
        cells = [ours.workload, str(ours.at_once), pool, seconds, rate, ratio, *rest]
        found.append("| " + " | ".join(cells) + " |")
    return "\n".join(found)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.seconds:.3f}",
        f"{row.programs_per_s:.2f}",
        f"{row.hit_rate:.1%}",
        f"{row.best_hit_rate:.1%}",
        f"{row.admissions_per_branch:.2f}",
        f"{row.computed:.3f}",
        f"{row.over_critical_path:.2f}",
        f"{row.share_of_floor:.0%}",
    ]
