"""The workloads, each as prompts and lengths. Prompts are random token ids, new ones for each run, so that nothing of
one run is cached for the next; decoding is greedy and does not stop at the end of a text.

    free_N        N prompts of 128 tokens, 256 tokens each
    json_N        the same, 256 tokens each under SCHEMA
    forkN_Pk      N prompts = one prefix of P * 1,024 tokens, already cached, and 16 own tokens; 128 tokens each
    prefill_16x4k 16 prompts of 4,096 tokens, 1 token each
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from sglite.errors import InvalidRequest

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "id": {"type": "integer"},
            "kind": {"enum": ["alpha", "beta", "gamma", "delta"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
            "score": {"type": "number"},
            "active": {"type": "boolean"},
        },
        "required": ["name", "id", "kind", "tags", "score", "active"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    rows: int
    prompt: int  # own tokens of each prompt
    output: int  # tokens of each answer
    prefix: int = 0  # tokens that all prompts begin with, in the cache already
    constrained: bool = False

    def prompts(self, vocab_size: int, *, seed: int) -> tuple[list[int], list[list[int]]]:
        """(the shared prefix, the whole prompts)."""
        draw = random.Random(f"{self.name}/{seed}")
        prefix = [draw.randrange(vocab_size) for _ in range(self.prefix)]
        return prefix, [prefix + [draw.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.rows)]


_SIZED = re.compile(r"(free|json)_(\d+)")
_FORKED = re.compile(r"fork(\d+)_(\d+)k")


def workload(name: str) -> Workload:
    """Raises InvalidRequest for a name that is none."""
    sized = _SIZED.fullmatch(name)
    if sized:
        return Workload(name, int(sized[2]), 128, 256, constrained=sized[1] == "json")
    forked = _FORKED.fullmatch(name)
    if forked:
        return Workload(name, int(forked[1]), 16, 128, prefix=1024 * int(forked[2]))
    if name == "prefill_16x4k":
        return Workload(name, 16, 4096, 1)
    raise InvalidRequest(
        f"no workload {name!r}; there are free_N and json_N for any number of rows N, forkN_Pk for N rows on P * 1,024 "
        "shared tokens, prefill_16x4k, start and first_json",
        param="workloads",
    )
