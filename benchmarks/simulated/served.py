"""`sglite.bench.programs.served` on the simulated device; `programs.py` with `--server` starts it.

    python -m benchmarks.simulated.served SIMULATION OPTIONS

SIMULATION is JSON, the fields of Simulation.
"""

from __future__ import annotations

import json
import sys

from benchmarks.simulated import Simulation, installed
from sglite.bench.programs import served


def main() -> None:
    with installed(Simulation(**json.loads(sys.argv[1]))):
        served.main(sys.argv[2:])


if __name__ == "__main__":
    main()
