"""An engine process: `python -m sglite.runtime.async_engine.child FOLDER BUILDER`, started by `process.py` only.

It ends when it is told to stop, when its loop breaks, or when its stdin ends, which means that its parent is gone.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from sglite.protocol import ErrorInfo
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.interpreter import beside_a_loop
from sglite.runtime.async_engine.loop import StepLoop
from sglite.runtime.async_engine.thread import Built
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.threads import limit_spinning

HEARTBEAT_S = 1.0
Build = Callable[[EngineConfig, Callable[[str], None]], Built]

LAST_WORDS_MS = 1000  # a last word gets through, a dead parent holds nobody up


class ZmqInbox:
    """Commands from the parent process."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # the pipe is full of wake-ups already
            return

    def take(self, timeout: float) -> list[m.Command]:
        if timeout:
            woken = dict(self._poller.poll(math.ceil(timeout * 1000)))
            if self._wake_read in woken:
                os.read(self._wake_read, 4096)
        commands: list[m.Command] = []
        while True:
            try:
                commands += m.decode_commands(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return commands


def main(folder: str, builder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = EngineConfig(**msgspec.json.decode(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # of this thread's sockets alone
    try:
        return _run(context, folder, builder, config)
    finally:
        context.destroy(linger=LAST_WORDS_MS)  # waits until the last event is on its way


def _run(context: zmq.Context[zmq.Socket[bytes]], folder: str, builder: str, config: EngineConfig) -> int:
    socket = _sender(context, folder)

    def emit(events: list[m.Event]) -> None:
        socket.send(m.encode(events))

    pulse = _Pulse(zmq.Context(), folder)
    pulse.start()
    limit_spinning()  # the builder's module imports torch
    try:
        built = _builder(builder)(config, lambda text: emit([m.Progress(text)]))
    except Exception as error:
        logging.getLogger("sglite.engine").exception("the engine could not start")
        emit([m.Died(ErrorInfo.of(error))])
        return 1
    commands = context.socket(zmq.PULL)
    commands.setsockopt(zmq.RCVHWM, 0)
    commands.bind(f"ipc://{folder}/commands")
    inbox = ZmqInbox(commands)
    loop = StepLoop(built.core, built.grammars, inbox, emit, built.stats)
    pulse.loop = loop
    with beside_a_loop():
        emit([m.Ready(built.model_info, built.facts)])
        loop.run()
        built.close()
    return 0


class _Pulse(threading.Thread):
    """Says once a second that the process is there, and how far its loop has come."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._socket = _sender(context, folder)  # sockets belong to one thread each
        self.loop: StepLoop | None = None

    def run(self) -> None:
        while True:
            loop = self.loop
            beat = m.Heartbeat(loop.turns, loop.busy) if loop else m.Heartbeat(0, False)
            self._socket.send(m.encode([beat]))
            time.sleep(HEARTBEAT_S)


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(3)  # at once and without cleaning up: nobody is left to answer to


def _sender(context: zmq.Context[zmq.Socket[bytes]], folder: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.connect(f"ipc://{folder}/events")
    return socket


def _builder(name: str) -> Build:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # daemon threads in native calls must not hold the exit up
