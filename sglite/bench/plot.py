"""A report as a picture: one panel of rates against the floor, one of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglite.errors import InvalidRequest


def plot(reports: list[Path], out: Path) -> None:
    """Bars for each workload of each report; the floor as a mark. Raises InvalidRequest without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise InvalidRequest("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    loaded = [json.loads(path.read_text()) for path in reports]
    figure, axes = pyplot.subplots(len(loaded), 2, figsize=(12, 3.6 * len(loaded)), squeeze=False)
    for (rates, times), report in zip(axes, loaded, strict=True):
        label = f"{Path(report['model']).name} on {report['device']}"
        _panel(rates, [row for row in report["rows"] if row["rate"]], "rate", f"{label}: output tokens/s")
        _panel(times, [row for row in report["rows"] if not row["rate"]], "seconds", f"{label}: seconds")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def _panel(axis: Any, rows: list[dict[str, Any]], value: str, title: str) -> None:
    names = [row["name"] for row in rows]
    bars = axis.bar(names, [row[value] for row in rows], color="#4c78a8", label="sglite")
    axis.bar_label(bars, labels=[f"{row[value]:,.3g}" if row[value] < 100 else f"{row[value]:,.0f}" for row in rows])
    for i, row in enumerate(rows):
        if row["floor_seconds"] is not None:
            best = row["floor_seconds"] if value == "seconds" else row["rate"] / row["share_of_floor"]
            axis.hlines(best, i - 0.4, i + 0.4, color="#e45756", label="floor" if i == 0 else None)
    if value == "rate":
        axis.set_yscale("log")
    axis.set_title(title)
    axis.tick_params(axis="x", rotation=30)
    if rows:
        axis.legend()
