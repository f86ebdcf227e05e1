"""`sglite bench cpu`: this engine against `transformers` on the same CPU, model, dtype and threads, in one run.

    batch 1            one prompt, tokens per second of decoding
    shared prefix      16 prompts with 300 tokens in common, 64 tokens each: one call here; a static batch, and one by
                       one, there
    tree of thought    the example's 30 generations as a program; and the same prompts as single calls, no cache
    constrained        1 and 16 rows under a JSON schema, and the same without one: prompts cached, grammar compiled
    start              a new process until its first token, model cached
    memory             peak resident size of a new process that answers the shared-prefix call

All greedy, float32, end of text ignored. The floor of batch 1 is reading every weight once a token at the rate at
which this machine reads memory.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from sglite.bench.offline import versions
from sglite.bench.workloads import SCHEMA
from sglite.protocol import SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.models.loader import resolve_model

TOKENS = 64
ROWS = 16
PREFIX = 300
_SEQUENTIAL = 4  # rows that run one by one; the time is scaled to all of them

_CHILD = """
import json, re, sys, time
import sglite as sgl
began = float(sys.argv[2])
engine = sgl.Engine(model=sys.argv[1])
first = next(iter(engine.stream("The capital of France is", {"max_tokens": 1, "temperature": 0})))
started = time.time() - began
if sys.argv[3] == "memory":
    prompts = json.loads(sys.stdin.read())
    engine.generate(input_ids=prompts, sampling={"max_tokens": 64, "temperature": 0, "ignore_eos": True})
engine.close()
status = open("/proc/self/status").read()  # getrusage's peak begins with that of the process that made this one
print(json.dumps({"start": started, "peak": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])}))
"""


def run(model: str, *, repeat: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Medians of `repeat` runs (best of both for the slow transformers calls, which run once)."""
    source = resolve_model(model, load_format="auto", tokenizer=None)
    numbers: dict[str, float] = {}
    start = [_child(model, "start", []) for _ in range(repeat)]
    numbers["start s"] = sorted(s["start"] for s in start)[repeat // 2]
    note(f"start to first token: {numbers['start s']:.2f} s")
    with Engine(config=EngineConfig(model=model, device="cpu")) as engine:
        prompt, rows = _prompts(engine)
        numbers |= _ours(engine, prompt, rows, repeat, note)
        numbers |= _constrained(engine, prompt, rows, repeat, note)
        numbers |= _tree(engine, model, note)
    numbers["peak memory GB"] = _child(model, "memory", rows)["peak"] / 1e9
    note(f"peak memory: {numbers['peak memory GB']:.2f} GB")
    numbers |= _theirs(str(source.folder), prompt, rows, note)
    numbers["read GB/s"] = _read_rate() / 1e9
    weights = 4 * 134_515_008 if model == "smollm2" else 0
    if weights:
        numbers["floor batch 1 tok/s"] = numbers["read GB/s"] * 1e9 / weights
        numbers["share of floor"] = numbers["batch 1 tok/s"] / numbers["floor batch 1 tok/s"]
    numbers["batch 1 ratio"] = numbers["batch 1 tok/s"] / numbers["transformers batch 1 tok/s"]
    numbers["shared ratio to static batch"] = numbers["shared tok/s"] / numbers["transformers static batch tok/s"]
    numbers["shared ratio to one by one"] = numbers["shared tok/s"] / numbers["transformers one by one tok/s"]
    return {
        "model": model, "versions": versions(), "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(), "numbers": {k: round(v, 3) for k, v in numbers.items()},
    }  # fmt: skip


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _prompts(engine: Engine) -> tuple[list[int], list[list[int]]]:
    text = "The harbour town has a lighthouse, two bakeries, a school and a ferry that leaves at six every morning. "
    prefix = engine.encode(text * 40)[:PREFIX]
    questions = [f" Question {i}: what does person number {i} see?" for i in range(ROWS)]
    return engine.encode("The capital of France is"), [prefix + engine.encode(q) for q in questions]


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _ours(
    engine: Engine, prompt: list[int], rows: list[list[int]], repeat: int, note: Callable[[str], None]
) -> dict[str, float]:
    def decode_rate() -> float:
        one = _timed(lambda: engine.generate(input_ids=prompt, sampling=_greedy(1)))
        return (TOKENS - 1) / (_timed(lambda: engine.generate(input_ids=prompt, sampling=_greedy(TOKENS))) - one)

    def shared_rate() -> float:
        engine.generate(input_ids=prompt, sampling=_greedy(1))
        _flush(engine)
        return ROWS * TOKENS / _timed(lambda: engine.generate(input_ids=rows, sampling=_greedy(TOKENS)))

    decode_rate()
    shared_rate()
    single = sorted(decode_rate() for _ in range(repeat))[repeat // 2]
    shared = sorted(shared_rate() for _ in range(repeat))[repeat // 2]
    note(f"batch 1: {single:.1f} tok/s; {ROWS} rows with a shared prefix: {shared:.1f} tok/s")
    return {"batch 1 tok/s": single, "shared tok/s": shared}


def _constrained(
    engine: Engine, prompt: list[int], rows: list[list[int]], repeat: int, note: Callable[[str], None]
) -> dict[str, float]:
    """Tokens per second under a schema and without, run by turns; the ratio is the median over the turns."""
    numbers: dict[str, float] = {}
    for name, prompts in (("batch 1", [prompt]), (f"{ROWS} rows", rows)):

        def rate(schema: dict[str, Any] | None, prompts: list[list[int]] = prompts) -> float:
            sampling = _greedy(TOKENS)
            seconds = _timed(lambda: engine.generate(input_ids=prompts, sampling=sampling, json_schema=schema))
            return len(prompts) * TOKENS / seconds

        turns = [(rate(SCHEMA), rate(None)) for _ in range(repeat + 1)][1:]
        middle = sorted(turns, key=lambda turn: turn[0] / turn[1])[len(turns) // 2]
        numbers |= {f"{name} json tok/s": middle[0], f"{name} plain tok/s": middle[1]}
        numbers[f"{name} json ratio"] = middle[0] / middle[1]
        note(f"{name} under a schema: {middle[0]:.1f} tok/s, {middle[0] / middle[1]:.2f} of the speed without")
    return numbers


def _flush(engine: Engine) -> None:
    import asyncio

    asyncio.run(engine.flush_cache())


def _tree(engine: Engine, model: str, note: Callable[[str], None]) -> dict[str, float]:
    """The tree of thought of the examples, 30 generations of 48 tokens."""
    from sglite.bench.tree import as_calls, as_program

    _flush(engine)
    prompts: list[str] = []
    program = _timed(lambda: prompts.extend(as_program(engine)))
    with Engine(config=EngineConfig(model=model, device="cpu", prefix_cache=False)) as plain:
        calls = _timed(lambda: as_calls(plain, prompts))
    note(f"tree of thought: {program:.1f} s as a program, {calls:.1f} s as single calls without a cache")
    return {"tree as program s": program, "tree as calls s": calls, "tree ratio": calls / program}


def _theirs(folder: str, prompt: list[int], rows: list[list[int]], note: Callable[[str], None]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = min(len(row) for row in rows)

    def generate(ids: list[list[int]], tokens: int) -> float:
        batch = torch.tensor(ids)
        with torch.inference_mode():
            return _timed(
                lambda: net.generate(
                    batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, min_new_tokens=tokens,
                    do_sample=False, pad_token_id=0,
                )
            )  # fmt: skip

    generate([prompt], 4)
    first = generate([prompt], 1)
    single = (TOKENS - 1) / (generate([prompt], TOKENS) - first)
    static = ROWS * TOKENS / generate([row[:width] for row in rows], TOKENS)
    seconds = sum(generate([row], TOKENS) for row in rows[:_SEQUENTIAL])
    alone = _SEQUENTIAL * TOKENS / seconds
    note(f"transformers: batch 1 {single:.1f}, static batch {static:.1f}, one by one {alone:.1f} tok/s")
    return {
        "transformers batch 1 tok/s": single,
        "transformers static batch tok/s": static,
        "transformers one by one tok/s": alone,
    }


def _read_rate() -> float:
    """Bytes per second of a sum over 1 GB, best of 5."""
    data = torch.ones(1 << 28)
    return data.nbytes / min(_timed(lambda: data.sum()) for _ in range(5))


def _child(model: str, what: str, rows: list[list[int]]) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, model, str(time.time()), what]
    done = subprocess.run(command, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
