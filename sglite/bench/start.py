"""One engine's start and its first constrained answer, in a process of its own: `python -m sglite.bench.start JSON`.

JSON: {"began": time.time() before the process was made, "config": EngineConfig's fields}. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import time

from sglite.bench.workloads import SCHEMA
from sglite.protocol import SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig


def main() -> None:
    given = json.loads(sys.argv[1])
    with Engine(config=EngineConfig(**given["config"])) as engine:
        ready = time.time()
        prompt = [random.Random(0).randrange(min(engine.model_info.vocab_size, 150_000)) for _ in range(64)]
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        engine.generate(input_ids=prompt, sampling=sampling, json_schema=SCHEMA)
        done = time.time()
    print(json.dumps({"start": ready - given["began"], "first_json": done - ready}))


if __name__ == "__main__":
    main()
