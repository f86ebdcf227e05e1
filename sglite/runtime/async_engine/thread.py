"""The step loop on a thread of this process: the cheapest way, and right where the GIL is not the bottleneck (CPU)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sglite.protocol import ModelInfo
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.front import Front, closed
from sglite.runtime.async_engine.interpreter import beside_a_loop
from sglite.runtime.async_engine.loop import StepLoop, ThreadInbox
from sglite.runtime.engine import EngineCore, GrammarService
from sglite.text.types import TextTokenizer


@dataclass(frozen=True, slots=True)
class Built:
    """Everything one engine consists of."""

    core: EngineCore
    grammars: GrammarService | None
    tokenizer: TextTokenizer
    model_info: ModelInfo
    stats: Callable[[], dict[str, Any]]
    close: Callable[[], None]  # what is left after core.close(): the grammar compiler's workers
    facts: dict[str, Any] = field(default_factory=dict)  # plain values for a front elsewhere; "tokenizer_folder"


class ThreadBack:
    """Builds and runs an engine on one thread, so that native thread pools exist once and not per thread."""

    def __init__(self, build: Callable[[], Built], front: Front) -> None:
        self._build = build
        self._front = front
        self._inbox = ThreadInbox()
        self._ready: Future[Built] = Future()
        self._thread = threading.Thread(target=self._run, name="sglite-engine", daemon=True)

    def start(self) -> Built:
        """Blocks until the model is loaded. Raises what the building raised."""
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self._inbox.put([m.Stop()])  # Ctrl-C while it loads: nobody will use it
            raise

    def send(self, commands: list[m.Command]) -> None:
        self._inbox.put(commands)

    def close(self) -> None:
        """Idempotent. Returns once the loop has ended."""
        self._inbox.put([m.Stop()])
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            built = self._build()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits in start()
            self._ready.set_exception(error)
            return
        try:
            with beside_a_loop():
                self._ready.set_result(built)
                loop = StepLoop(built.core, built.grammars, self._inbox, self._emit, built.stats, self._front.courtesy)
                loop.run()
        finally:
            built.close()
            self._front.fail(self._front.router.failure or closed())

    def _emit(self, events: list[m.Event]) -> None:
        aborts = self._front.handle(events)
        if aborts:
            self._inbox.put(aborts)
