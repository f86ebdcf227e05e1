"""How many CPU threads this process may use, and how they wait for each other."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Container, MutableMapping
from pathlib import Path

_SPINS = "2000"  # `pause` instructions, some 0.1 ms: the usual wait at a barrier, not a time slice


def limit_spinning(environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Let OpenMP threads that wait for each other go to sleep soon. Call before torch is first imported: libgomp reads
    its settings once, when it is loaded. Nothing is changed where torch is there already or the user has set either.

    libgomp by default spins 300,000 times (up to 10 ms) at every barrier, of which a step has hundreds. Where another
    process has the core of the thread that is waited for, the spinning itself keeps that thread from running.
    """
    if "torch" in loaded or "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ:
        return
    environ["GOMP_SPINCOUNT"] = _SPINS


def usable_cpus() -> int:
    """The smaller of the affinity mask and the control group's quota (v2, else v1); at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, math.ceil(quota)) if quota is not None else count)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs' worth of time per period, None where there is no limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period = int((root / "cpu/cpu.cfs_period_us").read_text())
        return None if limit <= 0 else limit / period
    except (OSError, ValueError):
        return None
