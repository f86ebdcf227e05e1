"""What only real weights can show: outputs that are complete and valid, and text that repeats its prompt."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from sglite.bench.structured.cases import SCHEMAS, Schema, closed
from sglite.grammar import spec
from sglite.grammar.schema import prepare
from sglite.protocol import FinishReason, RequestOutput, SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig

_PEOPLE = ("Ada Lovelace", "Grace Hopper", "Alan Turing", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
_CITIES = ("London", "New York", "Manchester", "Rotterdam", "Los Angeles", "Milwaukee")
_RECORD = closed(
    {
        "customer_full_name": {"type": "string", "maxLength": 40}, "delivery_city": {"type": "string", "maxLength": 30},
        "order_reference": {"type": "string", "maxLength": 20}, "quantity_ordered": {"type": "integer"},
    }
)  # fmt: skip
RECORDS: Schema = {"type": "array", "items": _RECORD, "minItems": 6, "maxItems": 6}


@dataclass(frozen=True)
class Validity:
    answers: int
    complete: int
    valid: int  # of the complete ones


def validity(engine: Engine, *, prompts: int, max_tokens: int) -> dict[str, Validity]:
    """Answers under the item of each schema, at temperature 0 and 1; every complete one is validated."""
    found: dict[str, Validity] = {}
    for name, many in SCHEMAS.items():
        schema = many["items"]
        check = prepare(json.dumps(schema)).validate
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
            texts = [f"Write one {name} record about number {i} as JSON:\n" for i in range(prompts)]
            outputs = engine.generate(texts, sampling, constraint=spec.json_schema(schema))
            complete = [o for o in outputs if o.finish_reason in (FinishReason.GRAMMAR, FinishReason.STOP)]
            wrong = [o.text for o in complete if check(o.text) is not None]
            found[f"{name} t={temperature:g}"] = Validity(len(outputs), len(complete), len(complete) - len(wrong))
    return found


@dataclass(frozen=True)
class Lookup:
    """Output tokens a second without and with prompt lookup, of one batch size."""

    rows: int
    without: float
    with_lookup: float
    accepted: float  # share of the drafted tokens
    same_text: bool

    @property
    def ratio(self) -> float:
        return self.with_lookup / self.without


def lookups(config: EngineConfig, sizes: list[int], *, drafts: int, repeat: int) -> list[Lookup]:
    """Copy-heavy extraction: six records in prose, to be written as JSON."""
    measured = [_all_best(replace(config, prompt_lookup=number), sizes, repeat) for number in (0, drafts)]
    found: list[Lookup] = []
    for rows in sizes:
        (plain, texts), (fast, others) = measured[0][rows], measured[1][rows]
        drafted = sum(o.usage.draft_tokens for o in others)
        accepted = sum(o.usage.accepted_draft_tokens for o in others) / max(drafted, 1)
        same = [o.text for o in texts] == [o.text for o in others]
        found.append(Lookup(rows, plain, fast, accepted, same))
    return found


def _all_best(config: EngineConfig, sizes: list[int], repeat: int) -> dict[int, tuple[float, list[RequestOutput]]]:
    with Engine(config=config) as engine:
        return {rows: _best(engine, rows, repeat) for rows in sizes}


def _best(engine: Engine, rows: int, repeat: int) -> tuple[float, list[RequestOutput]]:
    rates: list[float] = []
    outputs: list[RequestOutput] = []
    for i in range(repeat + 1):
        prompts = [_letter(seed=100 * i + n) for n in range(rows)]
        began = time.perf_counter()
        outputs = engine.generate(
            prompts, SamplingParams(max_tokens=300, temperature=0.0), constraint=spec.json_schema(RECORDS)
        )
        rates.append(sum(o.usage.completion_tokens for o in outputs) / (time.perf_counter() - began))
    return max(rates[1:]), outputs


def _letter(seed: int) -> str:
    """Records as text and, as an example, the first of them as JSON."""
    records: list[dict[str, Any]] = [
        {
            "customer_full_name": _PEOPLE[(seed + i) % 6], "delivery_city": _CITIES[(seed + 2 * i) % 6],
            "order_reference": f"REF-{7919 * (seed + i + 1) % 100_000:05}", "quantity_ordered": (seed * 7 + i) % 90 + 1,
        }
        for i in range(6)
    ]  # fmt: skip
    lines = "\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    return f"Records, one a line:\n{lines}\n\nThe same records as one JSON array:\n"
