"""What the host costs around a GPU's steps, measured on a CPU: `bench programs` on a device that only takes time.

    python tests/bench/program_host.py --tokenizer FOLDER [--workloads hellaswag,mmlu] [--at-once 16] [--scale 0.4]

FOLDER holds a tokenizer of the size in question (the vocabulary decides what masks cost) and config.json. The device
takes `--step-ms` and `--token-us` for a step and works beside the host, as a GPU does; a launch costs the host what
kernels do, releasing the interpreter lock at each. What it draws is a hash; where a mask allows a token that a prompt
ended in, it draws that one (`--agree`, as a trained model does) or any.

Prints for each workload both ways: seconds, steps, the seconds of the phases, CPU seconds of the step loop's thread,
and the ratio of calls to programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sglite.bench.programs import price
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.stands import COUNTED, WAYS, EngineStand
from sglite.bench.programs.workloads import workload
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.vocab import Vocab
from sglite.protocol import ModelInfo
from sglite.runtime.async_engine.facade import Engine
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.process import ProcessBack
from sglite.runtime.async_engine.thread import Built, ThreadBack
from sglite.runtime.batch import NO_MASK, Batch, StepResult
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.runtime.engine import EngineCore
from sglite.text.tokenizer import Tokenizer

_OPS_GRAPH, _OPS_EAGER, _OPS_SAMPLE = 12, 430, 25  # launches of a step
_OP_S = 12e-6  # the host's share of one
_BLOB = bytes(6000)  # checksums of more than 5 KiB are made without the interpreter lock


def busy_launches(count: int) -> None:
    for _ in range(count):
        end = time.perf_counter() + _OP_S
        while time.perf_counter() < end:
            pass
        zlib.crc32(_BLOB)


class TimedExecutor:
    """Implements sglite.runtime.batch.Executor: a device that works beside the host and computes nothing."""

    page_size = 1
    overlaps = True
    shares_prefix_reads = False
    kept_mask_rows = 256

    def __init__(
        self, *, vocab_size: int, max_rows: int, num_pages: int, step_s: float, token_s: float, liked: set[int]
    ) -> None:
        self.num_pages, self.max_rows, self.vocab_size = num_pages, max_rows, vocab_size
        self.mask_rows = 4 * max_rows
        self._step_s, self._token_s, self._liked = step_s, token_s, liked
        self._mask = np.zeros((self.mask_rows, -(-vocab_size // 32)), np.int32)
        self._kept = np.zeros((self.kept_mask_rows, self._mask.shape[1]), np.int32)
        self._free_at = 0.0
        self._dice = np.random.default_rng(0)
        self.device_s = 0.0

    def forward(self, batch: Batch) -> None:
        eager = int(batch.num_new.max()) > 1
        busy_launches(_OPS_EAGER if eager else _OPS_GRAPH)
        took = self._step_s + self._token_s * batch.num_tokens
        self._free_at = max(time.perf_counter(), self._free_at) + took
        self.device_s += took

    def mask_buffer(self) -> Bitmask:
        return self._mask

    def sample(self, batch: Batch) -> TimedPending:
        busy_launches(_OPS_SAMPLE)
        for slot, place in batch.kept_masks:
            self._kept[place] = self._mask[slot]
        width = 1 + int(batch.num_drafts.max())
        rows = len(batch.rows)
        tokens = self._dice.integers(1000, 100_000, (rows, width)).astype(np.int32)
        result = StepResult(batch.samples.astype(np.int32), tokens)
        ends = np.cumsum(batch.num_logits)
        token_ends = np.cumsum(batch.num_new)
        for i in np.flatnonzero(batch.samples).tolist():
            drafts = int(batch.num_drafts[i])
            first = int(ends[i]) - 1 - drafts
            for k in range(1 + drafts):
                slot = int(batch.mask_slots[first + k])
                if slot != NO_MASK:
                    tokens[i, k] = self._allowed(slot, int(tokens[i, k]))
                result.num_accepted[i] = k + 1
                if k < drafts and tokens[i, k] != batch.token_ids[token_ends[i] - drafts + k]:
                    break
        for i, ids in batch.target_ids.items():
            result.chosen_logprobs[i] = -self._dice.random(len(ids), np.float32)
        return TimedPending(result, self._free_at)

    def _allowed(self, slot: int, wished: int) -> int:
        """One of the tokens that a mask allows, found without looking at all of them."""
        mask = self._mask[slot] if slot < self.mask_rows else self._kept[slot - self.mask_rows]
        words = mask.view(np.uint32)
        for token_id in self._liked:
            if words[token_id >> 5] >> np.uint32(token_id & 31) & 1 and int(words[0]) != 0xFFFF_FFFF:
                return token_id
        some = np.flatnonzero(words)
        place = int(some[wished % len(some)])
        bits = [bit for bit in range(32) if int(words[place]) >> bit & 1]
        return 32 * place + bits[wished % len(bits)]

    def rest(self) -> bool:
        return False

    def close(self) -> None:
        pass


class TimedPending:
    def __init__(self, result: StepResult, ready_at: float) -> None:
        self._result, self._ready_at = result, ready_at

    def wait(self) -> StepResult:
        left = self._ready_at - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return self._result


class Healing:
    """The compiler, which tells what prompts ended in."""

    def __init__(self, grammars: GrammarCompiler, liked: set[int] | None) -> None:
        self._grammars, self._liked = grammars, liked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammars, name)

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        if self._liked is not None:
            self._liked.add(token_id)
        return self._grammars.heal(token_id, inner)


def builder(options: argparse.Namespace) -> Callable[[], Built]:
    def build() -> Built:
        tokenizer = Tokenizer.from_folder(Path(options.tokenizer))
        vocab = Vocab.of(tokenizer, vocab_size=tokenizer.vocab_size)
        grammars = GrammarCompiler(vocab, CompilerConfig(num_threads=1, fill_threads=1))
        grammars.warm()
        liked: set[int] = set()
        executor = TimedExecutor(
            vocab_size=tokenizer.vocab_size,
            max_rows=options.max_rows,
            num_pages=600_000,
            step_s=options.step_ms / 1e3,
            token_s=options.token_us / 1e6,
            liked=liked,
        )
        core = EngineCore(
            executor,
            tokenizer,
            Healing(grammars, liked if options.agree else None),  # type: ignore[arg-type]
            EngineConfig(max_rows=options.max_rows),
            max_model_len=40_000,
            defaults=SamplingDefaults(temperature=0.0),
        )
        info = ModelInfo(
            name="timed",
            architecture="timed",
            vocab_size=tokenizer.vocab_size,
            max_model_len=40_000,
            bos_token_id=None,
            stop_token_ids=tokenizer.stop_token_ids,
            has_chat_template=True,
        )

        def stats() -> dict[str, Any]:
            return dataclasses.asdict(core.metrics) | {
                "thread_s": time.thread_time(),
                "device_s": executor.device_s,
            }

        facts = {"num_pages": 600_000, "page_size": 1, "tokenizer_folder": options.tokenizer}
        return Built(core, grammars, tokenizer, info, stats, grammars.close, facts)

    return build


def build_in_process(config: EngineConfig, progress: Callable[[str], None]) -> Built:
    """For `--process`: the options come as JSON in the name of the model."""
    return builder(argparse.Namespace(**json.loads(config.model)))()


def started(options: argparse.Namespace) -> Engine:
    front = Front()
    if options.process:
        sys.path.insert(0, str(Path(__file__).parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        config = EngineConfig(model=json.dumps(vars(options)), tokenizer=options.tokenizer)
        back: Any = ProcessBack(config, front, builder="program_host:build_in_process")
    else:
        back = ThreadBack(builder(options), front)
    begun = back.start()
    engine = Engine.over(front, back, begun.tokenizer, begun.model_info)
    engine.facts = begun.facts
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workloads", default="hellaswag,skeleton_of_thought,mmlu,react")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.4)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--pause-scale", type=float, default=0.25)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=4.5)
    parser.add_argument("--token-us", type=float, default=22.0)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--switch-ms", type=float, default=0.0, help="sys.setswitchinterval")
    parser.add_argument("--process", action="store_true", help="the engine has a process of its own")
    parser.add_argument("--agree", action="store_true")
    parser.add_argument("--ways", default="programs,calls")
    options = parser.parse_args()
    if options.switch_ms:
        sys.setswitchinterval(options.switch_ms / 1e3)
    with started(options) as engine:
        texts = Texts(
            engine.tokenizer, Shape(scale=options.scale, pause_scale=options.pause_scale, share=options.share)
        )
        for name in options.workloads.split(","):
            measure(engine, name, texts, options)


def measure(engine: Engine, name: str, texts: Texts, options: argparse.Namespace) -> None:
    load = workload(name, texts)
    arguments = load.arguments(options.at_once)
    seconds: dict[str, float] = {}
    for number in range(1 + options.repeat):
        for way in WAYS:
            if way not in options.ways.split(","):
                continue
            gc.collect()
            before = engine.stats()
            run = EngineStand(engine).run_once(load, arguments, way, options.at_once)
            after = engine.stats()
            if number == 0:
                continue
            device = after["device_s"] - before["device_s"]
            path = price.critical_path(run.calls, chunk=8192)
            c = run.counts
            phases = " ".join(f"{k[:-2]} {c[k]:.3f}" for k in COUNTED if k.endswith("_s"))
            seconds[way] = run.seconds
            over = run.seconds / (path.seconds + max(map(load.pause_s, arguments)))
            print(
                f"{name:20} {way:9} {run.seconds:7.3f} s  device {device:6.3f}  steps {c['steps']:4.0f}"
                f"  path {path.steps} ({over:4.2f})  loop cpu {after['thread_s'] - before['thread_s']:.3f}  {phases}",
                flush=True,
            )
    if len(seconds) == 2:
        print(f"{name:20} ratio {seconds['calls'] / seconds['programs']:.2f}", flush=True)


if __name__ == "__main__":
    main()
