"""How much host memory may still be taken."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int:
    """Bytes: what the kernel calls available, or what the control group leaves where that is less."""
    found = [value for value in (_meminfo(), _cgroup(Path("/sys/fs/cgroup"))) if value is not None]
    return min(found) if found else 1 << 32


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup(root: Path) -> int | None:
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int((root / limit).read_text()) - int((root / usage).read_text()))
        except (OSError, ValueError):
            continue  # not this version of control groups, or "max": no limit
    return None
