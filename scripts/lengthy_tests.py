"""Make tests/lengthy.txt, which `make check` leaves out, of what pytest measured:

    python -m pytest -q --durations=0 --durations-min=0.05 | python scripts/lengthy_tests.py

A test function is lengthy where it, all its cases together, takes longer than LIMIT. Lines that name a whole file are
written by hand and stay.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LIMIT = 0.7  # seconds
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?::[^\[\s]+)")


def main() -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in sys.stdin:
        found = _LINE.match(line)
        if found:
            seconds[found[2]] += float(found[1])
    target = Path(__file__).resolve().parent.parent / "tests" / "lengthy.txt"
    files = [line for line in target.read_text(encoding="utf-8").splitlines() if "::" not in line]
    found = [name for name, total in seconds.items() if total > LIMIT and name.partition("::")[0] not in files]
    names = sorted(files + found)
    target.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    left_out = sum(seconds[name] for name in found)
    print(f"{len(found)} of the tests are lengthy: {left_out:.0f} of {sum(seconds.values()):.0f} s")


if __name__ == "__main__":
    main()
