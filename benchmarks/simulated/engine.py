"""A whole Engine over the simulated device, and what makes any benchmark use it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.simulated.executor import SimulatedExecutor
from benchmarks.simulated.times import FREE_BYTES, costs_for
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.matcher import Matcher
from sglite.grammar.vocab import Vocab
from sglite.runtime.async_engine import build as real
from sglite.runtime.async_engine.facade import Engine
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.process import ProcessBack
from sglite.runtime.async_engine.thread import Built, ThreadBack
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import EngineCore
from sglite.runtime.models.config import max_context
from sglite.runtime.models.sources import resolve_model
from sglite.text.tokenizer import Tokenizer

_OPTIONS = "SGLITE_SIMULATED"  # an engine's own process reads them there


@dataclass(frozen=True)
class Simulation:
    slower: float = 1.5  # this machine's cores than the H200's host
    agree: float = 0.0  # how often a legal draft, or the token that a prompt ended in, is drawn
    repeat: float = 0.98  # how often a constrained row says its last token again where it may
    fill_threads: int = 1


class _Healing:
    """The compiler, which tells the device what prompts ended in."""

    def __init__(self, grammars: GrammarCompiler, executor: SimulatedExecutor) -> None:
        self._grammars, self._executor = grammars, executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammars, name)

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        self._executor.jobs.like(token_id)
        return self._grammars.heal(token_id, inner)


def build(config: EngineConfig, progress: Callable[[str], None], simulation: Simulation | None = None) -> Built:
    """In place of sglite.runtime.async_engine.build.build: `config.model` is a folder with config.json and a tokenizer,
    whose sizes decide the times."""
    given = simulation or Simulation(**json.loads(os.environ.get(_OPTIONS, "{}")))
    source = resolve_model(config.model, load_format="dummy", tokenizer=config.tokenizer)
    tokenizer = Tokenizer.from_folder(source.tokenizer_folder)
    max_len = max_context(config.max_model_len, source.config)
    vocab = Vocab.of(tokenizer, vocab_size=min(tokenizer.vocab_size, source.config.vocab_size))
    grammars = GrammarCompiler(vocab, CompilerConfig(num_threads=1, fill_threads=given.fill_threads))
    grammars.warm()
    costs = costs_for(source.config.hidden_size)
    pages = config.num_pages or FREE_BYTES // (costs.kv_bytes * config.page_size)
    executor = SimulatedExecutor(
        costs,
        vocab_size=min(tokenizer.vocab_size, source.config.vocab_size),
        max_rows=config.max_rows,
        max_model_len=max_len,
        num_pages=min(pages, config.max_rows * max_len // config.page_size),
        page_size=config.page_size,
        max_step_tokens=config.max_step_tokens or 8192,
        slower=given.slower,
        agree=given.agree,
        repeat=given.repeat,
    )
    service: Any = _Healing(grammars, executor) if given.agree else grammars
    core = EngineCore(
        executor, tokenizer, service, config, max_model_len=max_len, defaults=real.sampling_defaults(source)
    )

    def stats() -> dict[str, Any]:
        device = {name: getattr(executor, name) for name in ("device_s", "idle_s", "late_s")}
        return dataclasses.asdict(core.metrics) | core.cache_rates() | device | {"thread_s": time.thread_time()}

    facts = {
        "tokenizer_folder": str(source.tokenizer_folder),
        "num_pages": executor.num_pages,
        "page_size": executor.page_size,
    }
    info = real._model_info(config, source, tokenizer, max_len)
    return Built(core, grammars, tokenizer, info, stats, grammars.close, facts)


def engine(config: EngineConfig, simulation: Simulation | None = None, *, process: bool = False) -> Engine:
    """As Engine(config=config, process=process), over the simulated device."""
    given = simulation or Simulation()
    front = Front()
    if process:
        os.environ[_OPTIONS] = json.dumps(dataclasses.asdict(given))
        back: Any = ProcessBack(config, front, builder=f"{__name__}:build")
    else:
        back = ThreadBack(lambda: build(config, front.progress, given), front)
    started = back.start()
    made = Engine.over(front, back, started.tokenizer, started.model_info)
    made.config, made.facts = config, started.facts
    return made


@contextmanager
def installed(simulation: Simulation | None = None) -> Iterator[None]:
    """Within it, every Engine(config=...) of this process is a simulated one: for benchmarks that make their own."""
    init = Engine.__init__

    def simulated(
        self: Engine,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        process: bool = False,
        **rest: Any,
    ) -> None:
        made = engine(config or EngineConfig(model=model or "", **rest), simulation, process=process)
        self.__dict__.update(made.__dict__)
        made._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._back.close)

    Engine.__init__ = simulated  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.__init__ = init  # type: ignore[method-assign]
