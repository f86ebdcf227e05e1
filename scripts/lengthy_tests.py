"""Make tests/lengthy.txt, which `make check` leaves out, of what pytest measured:

    python -m pytest -q --durations=0 --durations-min=0.05 | python scripts/lengthy_tests.py

A test function is lengthy where it, all its cases together, takes longer than LIMIT. Lines that name a whole file or
folder are written by hand and stay; so do tests that were not measured this time (with --quick they are not).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LIMIT = 1.0  # seconds
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?::[^\[\s]+)")


def main() -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in sys.stdin:
        found = _LINE.match(line)
        if found:
            seconds[found[2]] += float(found[1])
    root = Path(__file__).resolve().parent.parent
    target = root / "tests" / "lengthy.txt"
    known = target.read_text(encoding="utf-8").splitlines()
    by_hand = [line for line in known if "::" not in line]
    unmeasured = [line for line in known if "::" in line and line not in seconds and _is_there(root, line)]
    found = [name for name, total in seconds.items() if total > LIMIT and name.partition("::")[0] not in by_hand]
    names = sorted(by_hand + unmeasured + found)
    target.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    left_out = sum(seconds[name] for name in found)
    print(f"{len(found)} of the tests are lengthy: {left_out:.0f} of {sum(seconds.values()):.0f} s")


def _is_there(root: Path, name: str) -> bool:
    file, _, test = name.partition("::")
    path = root / file
    return path.is_file() and f"def {test.rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
