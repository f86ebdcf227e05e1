"""All of `sglite bench structured`. What is measured is written away part by part: one that fails loses no other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglite.bench.structured import bystander, real, run
from sglite.bench.structured.run import Way
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig

Note = Callable[[str], None]
Part = Callable[[], dict[str, Any]]

_ARRIVALS, _TOKENS = 32, 400  # of the bystander test


def parts(
    config: EngineConfig,
    names: Sequence[str],
    ways: Sequence[Way],
    *,
    with_bystander: bool,
    with_real: bool,
    streams: int,
    repeat: int,
    note: Note,
) -> list[Part]:
    """Each makes an engine of its own and gives what it adds to the report."""

    def cases() -> dict[str, Any]:
        with Engine(config=config) as engine:
            found = run.run(engine, names, ways, repeat=repeat, note=note).as_json()
            if with_real:
                answers = real.validity(engine, prompts=4, max_tokens=250)
                found["validity"] = {name: vars(one) for name, one in answers.items()}
                note(f"validity: {found['validity']}")
        return found

    def streams_beside() -> dict[str, Any]:
        with Engine(config=config, process=True) as engine:  # as a server has it: clients compute elsewhere
            gaps = bystander.run(engine, streams=streams, arrivals=_ARRIVALS, tokens=_TOKENS)
        found = {way: vars(one) for way, one in gaps.items()}
        note(f"bystander, ms between tokens: {found}")
        return {"bystander": found}

    def lookup() -> dict[str, Any]:
        pairs = real.lookups(config, [1, 64], drafts=8, repeat=repeat)
        found = [{**vars(one), "ratio": one.ratio} for one in pairs]
        note(f"prompt lookup: {found}")
        return {"lookup": found}

    return [cases, *([streams_beside] if with_bystander else ()), *([lookup] if with_real else ())]


def measure(parts: Sequence[Part], write: Callable[[dict[str, Any]], None]) -> None:
    """`write` gets the report so far after each part, whose memory the next one may have."""
    report: dict[str, Any] = {}
    for part in parts:
        report |= part()
        write(report)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
