"""Runs workloads in all ways of a stand (stands.py), in turns, and reports what each cost and should have cost.

Every run begins with an empty cache. The first of each way is not counted: kernels, graphs and grammars of its shapes
are made in it. `seconds` is the time from the start of the first program to the end of the last; for programs it
includes compiling (tracing, schemas, the static prefix).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglite.bench.calibrate import Rates, calibrate
from sglite.bench.floors import ModelCost
from sglite.bench.offline import device_name, model_config, placement, versions
from sglite.bench.programs import price
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.stands import WAYS, EngineStand, Measured, Stand, Way, server
from sglite.bench.programs.workloads import Arguments, Workload, workload
from sglite.errors import InvalidRequest
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig


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
    ways: tuple[Way, ...] = WAYS
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
        served: bool = False,
        ways: Sequence[str] = (),
    ) -> None:
        """`process`: the engine has one of its own. `served`: against a server. `ways`: of all that there are, these;
        programs are always one of them."""
        self._config = config
        self._process = process
        self._served = served
        self._ways = ways
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
        with self._stand(self._config) as stand:
            ways = self._chosen(stand)
            texts = Texts(stand.tokenizer, self._shape)
            loads = [(name, workload(name, texts)) for name in names]
            device, dtype = placement(self._config)
            self._cost = ModelCost.of(model_config(self._config), dtype.itemsize)
            rates = calibrate(device, dtype)
            report = Report(self._config.model, versions(), device_name(device), rates, self._shape, ways)
            self._note(f"{report.device}: copy {rates.copy / 1e12:.3f} TB/s, matmul {rates.matmul / 1e12:.1f} TFLOP/s")
            self._note(HEAD)
            for name, load in loads:
                for number in at_once:
                    self._measure(report, stand, name, load, number, None)
        return report

    def _chosen(self, stand: Stand) -> tuple[Way, ...]:
        unknown = [way for way in self._ways if way not in stand.ways]
        if unknown:
            raise InvalidRequest(f"no way {unknown[0]!r} here; there are {', '.join(stand.ways)}", param="ways")
        return tuple(way for way in stand.ways if not self._ways or way == "programs" or way in self._ways)

    @contextmanager
    def _stand(self, config: EngineConfig) -> Iterator[Stand]:
        if self._served:
            with server(config) as stand:
                yield stand
        else:
            with Engine(config=config, process=self._process) as engine:
                yield EngineStand(engine)

    def _in_pools(self, report: Report, at_once: int, pools: Sequence[float]) -> None:
        need = max(r.distinct_tokens for r in report.rows if (r.workload, r.at_once) == ("react", at_once))
        for pool in pools:
            page = self._config.page_size
            config = replace(self._config, num_pages=int(pool * need) // page)
            self._in_pool(report, config, at_once, pool)
            gc.collect()

    def _in_pool(self, report: Report, config: EngineConfig, at_once: int, pool: float) -> None:
        with self._stand(config) as stand:
            load = workload("react", Texts(stand.tokenizer, self._shape))
            self._measure(report, stand, "react", load, at_once, pool)

    def _measure(
        self, report: Report, stand: Stand, name: str, load: Workload, at_once: int, pool: float | None
    ) -> None:
        """All ways in turns, so that what slows the machine slows all."""
        arguments = load.arguments(at_once)
        found: dict[Way, list[Measured]] = {way: [] for way in report.ways}
        for number in range(self._repeat + self._warm):
            for way in report.ways:
                measured = stand.run_once(load, arguments, way, at_once)
                if number >= self._warm:
                    found[way].append(measured)
        for way in report.ways:
            row = self._row(report.rates, stand, name, load, arguments, way, at_once, pool, found[way])
            report.rows.append(row)
        self._note("\n".join(lines(report.rows[-len(report.ways) :])))

    def _row(
        self,
        rates: Rates,
        stand: Stand,
        name: str,
        load: Workload,
        arguments: list[Arguments],
        way: Way,
        at_once: int,
        pool: float | None,
        runs: list[Measured],
    ) -> Row:
        run = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        seconds = statistics.median(r.seconds for r in runs)
        chunk = self._config.max_step_tokens or (512 if placement(self._config)[0].type == "cpu" else 8192)
        path = price.critical_path(run.calls, chunk=chunk)
        pause_s = max(map(load.pause_s, arguments))
        least = price.least_tokens(run.calls)
        hit_rate, best = price.hit_rates(run.calls, run.warmed, capacity=stand.capacity)
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


HEAD = (
    "workload            way       at once  pool   seconds  prog/s   hits  best  adm/br  computed  /path  floor  ratio"
)


def lines(group: Sequence[Row]) -> list[str]:
    """One line for each way of a workload; the ratio is that of its seconds to the programs', which come first."""
    found: list[str] = []
    for row in group:
        pool = "" if row.pool is None else f"{row.pool:g}"
        found.append(
            f"{row.workload:19} {row.way:9} {row.at_once:7} {pool:>5} {row.seconds:9.3f} {row.programs_per_s:7.2f}"
            f" {row.hit_rate:6.1%} {row.best_hit_rate:6.1%} {row.admissions_per_branch:6.2f} {row.computed:8.3f}"
            f" {row.over_critical_path:6.2f} {row.share_of_floor:6.1%} {row.seconds / group[0].seconds:6.2f}"
        )
    return found


def table(report: Report) -> str:
    """GitHub's Markdown: a line for each workload and number of programs, in a cell the ways behind each other."""
    head = (
        "| workload | at once | KV pool | seconds | programs/s | ratio | hit rate | best hit rate | admissions a branch"
        " | computed / least | / critical path | of the floor |"
    )
    found = [f"Ways: {' / '.join(report.ways)}.", "", head, "| --- " * 12 + "|"]
    size = len(report.ways)
    for group in (report.rows[i : i + size] for i in range(0, len(report.rows), size)):
        ours = group[0]
        seconds, rate, *rest = (" / ".join(cells) for cells in zip(*map(_cells, group), strict=True))
        pool = "" if ours.pool is None else f"{ours.pool:g}x"
        ratio = " / ".join(f"{row.seconds / ours.seconds:.2f}" for row in group[1:])
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
