"""The step loop in a process of its own, seen from the callers' process.

    commands -> PUSH ipc://FOLDER/commands -> child     msgpack frames, a folder that only this user can enter
    events   <- PULL ipc://FOLDER/events   <- child
    stdin of the child: its options, then held open; its end tells the child that this process is gone

One thread reads events and watches the child: an exit is seen at once (pidfd), a child that hangs by its heartbeats.
Each child gets a folder of its own, so nothing that was meant for a dead one reaches its successor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sglite import bytecode
from sglite.errors import EngineDead, SgliteError
from sglite.protocol import ModelInfo
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.front import Front, closed
from sglite.runtime.config import EngineConfig
from sglite.text.tokenizer import Tokenizer
from sglite.text.types import TextTokenizer

log = logging.getLogger("sglite.engine")

BUILDER = "sglite.runtime.async_engine.build:build"
LAST_WORDS_MS = 300
POLL_MS = 200  # how often it is looked whether the child lives, and whether the engine is being closed
SILENCE_S = 60.0  # without any event, heartbeats included: the child hangs
STUCK_S = 300.0  # within one turn of the loop: the device hangs
STOP_S = 10.0  # a child that was told to stop is killed after that
RESTART_DELAYS_S = (0.0, 1.0, 4.0, 15.0)  # before each attempt in a row; then the engine stays dead


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    tokenizer: TextTokenizer
    model_info: ModelInfo
    facts: dict[str, Any]


class Child:
    """One engine process and the two sockets to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, builder: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sglite-"))  # made with mode 0700
        self._commands = _socket(context, zmq.PUSH)
        self.events = _socket(context, zmq.PULL)
        # Who sends connects and who receives binds: a connected PUSH socket queues while its peer is not there (yet, or
        # any more), a bound one would block the sender.
        self._commands.connect(f"ipc://{self.folder}/commands")
        self.events.bind(f"ipc://{self.folder}/events")
        self._lock = threading.Lock()  # of the command socket, which callers' threads share
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglite.runtime.async_engine.child", str(self.folder), builder],
            stdin=subprocess.PIPE,
            env=bytecode.environment(),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(dataclasses.asdict(config)) + b"\n")
        self.process.stdin.flush()
        self.exit_fd = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None

    def send(self, commands: list[m.Command]) -> None:
        frame = m.encode(commands)
        with self._lock:
            if not self._commands.closed:
                self._commands.send(frame)

    def end(self, *, patience_s: float) -> None:
        """Wait for the process, kill it when it takes too long, and remove every trace. Called by one thread."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        with self._lock:
            self._commands.close()
        self.events.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def why(self) -> str:
        code = self.process.poll()
        if code is None:
            return "it hung"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessBack:
    """Runs an engine process, and with `restart` another one when it dies."""

    def __init__(
        self,
        config: EngineConfig,
        front: Front,
        *,
        restart: bool = False,
        builder: str = BUILDER,
        load_tokenizer: Callable[[m.Ready], TextTokenizer] | None = None,
    ) -> None:
        self._config = config
        self._front = front
        self._restart = restart
        self._builder = builder
        self._load_tokenizer = load_tokenizer or TokenizerBeside(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._child = Child(self._context, config, builder)
        self._closing = threading.Event()
        self._stopped = 0.0  # time.monotonic() seconds, when it was told to close
        self._replacing = threading.Lock()  # a child that is told to stop has no successor
        self._ready_seen = False  # of the present child
        self._started: Future[m.Ready] = Future()
        self._thread = threading.Thread(target=self._watch, name="sglite-engine-events", daemon=True)

    @property
    def pid(self) -> int:
        """Of the present child."""
        return self._child.process.pid

    def start(self) -> Started:
        """Blocks until the model is loaded. Raises what the child's building raised, or EngineDead."""
        self._thread.start()
        try:
            ready = self._started.result()
            return Started(self._load_tokenizer(ready), ready.model_info, ready.facts)
        except BaseException:
            self.close()
            raise

    def send(self, commands: list[m.Command]) -> None:
        self._child.send(commands)

    def close(self) -> None:
        """Idempotent. Returns once the child has ended."""
        with self._replacing:
            if not self._closing.is_set():
                self._stopped = time.monotonic()
            self._closing.set()
        self._child.send([m.Stop()])
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        """Reads events of one child after the other, until closed or out of attempts."""
        attempts = 0
        while True:
            child = self._child
            error: BaseException | None = None
            try:
                failure = self._listen(child)
            except BaseException as problem:  # noqa: BLE001 - of a caller's on_progress, say; all wait for this thread
                error = problem
                failure = EngineDead(f"what the engine process said was not taken: {type(error).__name__}: {error}")
            child.end(patience_s=self._patience_s)
            if not self._started.done():
                self._started.set_exception(error or failure)
            if not self._closing.is_set():
                self._front.fail(failure)
                log.error("%s", failure)
                attempts = 0 if self._ready_seen else attempts
                if not self._restart or not self._started_well() or attempts >= len(RESTART_DELAYS_S):
                    break
                self._closing.wait(RESTART_DELAYS_S[attempts])
                attempts += 1
            with self._replacing:
                if self._closing.is_set():
                    self._front.fail(closed())
                    break
                self._child = Child(self._context, self._config, self._builder)
        self._context.term()

    def _listen(self, child: Child) -> SgliteError:
        """Hands events on until the child is gone; returns why it is."""
        self._ready_seen = False
        vital = _VitalSigns()
        poller = zmq.Poller()
        poller.register(child.events, zmq.POLLIN)
        if child.exit_fd is not None:
            poller.register(child.exit_fd, zmq.POLLIN)
        while True:
            poller.poll(POLL_MS)
            exited = child.process.poll() is not None
            if exited:
                child.events.poll(LAST_WORDS_MS)  # what it sent may still be on its way through this process
            failure = self._drain(child, vital)
            if failure is not None:
                return failure
            if exited or vital.lost() or (self._closing.is_set() and not self._patience_s):
                return EngineDead(f"the engine process died ({child.why()})")

    def _drain(self, child: Child, vital: _VitalSigns) -> SgliteError | None:
        """Everything that has arrived. Returns an error that the child itself told of."""
        while True:
            try:
                frame = child.events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            events = m.decode_events(frame)
            for event in events:
                if isinstance(event, m.Died):
                    return event.error.to_exception()
                if isinstance(event, m.Ready):
                    self._ready(event)
                vital.see(event)
            aborts = self._front.handle(events)
            if aborts:
                child.send(aborts)

    def _ready(self, ready: m.Ready) -> None:
        self._ready_seen = True
        if self._started.done():
            self._front.revive()
        else:
            self._started.set_result(ready)

    @property
    def _patience_s(self) -> float:
        """How long the child may still take to stop. One that loads its model hears of it when it has: nobody waits."""
        if not self._closing.is_set() or not self._ready_seen:
            return 0.0
        return max(0.0, self._stopped + STOP_S - time.monotonic())

    def _started_well(self) -> bool:
        """A child that never became ready would not do so the next time either."""
        return self._started.done() and self._started.exception() is None


class _VitalSigns:
    """When something was last heard, and since when the loop is in the same turn."""

    def __init__(self) -> None:
        self._heard = self._turned = time.monotonic()
        self._turns = -1

    def see(self, event: m.Event) -> None:
        self._heard = time.monotonic()
        if not isinstance(event, m.Heartbeat) or not event.busy or event.turns != self._turns:
            self._turned = self._heard
        if isinstance(event, m.Heartbeat):
            self._turns = event.turns

    def lost(self) -> bool:
        now = time.monotonic()
        return now - self._heard > SILENCE_S or now - self._turned > STUCK_S


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # No limit: a full queue would block a caller's thread, and admission has bounded what may wait before it gets here.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


class TokenizerBeside:
    """Loads this process's tokenizer while the child loads its own (a second for 152k tokens), where it is known
    beforehand which: that of a folder."""

    def __init__(self, config: EngineConfig) -> None:
        folder = Path(config.tokenizer or config.model)
        self._folder = str(folder) if Path(config.model).is_dir() and (folder / "tokenizer.json").is_file() else None
        self._loaded: Future[TextTokenizer] = Future()
        if self._folder is not None:
            threading.Thread(target=self._load, args=(folder,), name="sglite-tokenizer", daemon=True).start()

    def __call__(self, ready: m.Ready) -> TextTokenizer:
        folder = ready.facts["tokenizer_folder"]
        return self._loaded.result() if folder == self._folder else Tokenizer.from_folder(folder)

    def _load(self, folder: Path) -> None:
        try:
            self._loaded.set_result(Tokenizer.from_folder(folder))
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._loaded.set_exception(error)
