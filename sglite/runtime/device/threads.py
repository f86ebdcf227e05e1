"""How many CPU threads this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


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
