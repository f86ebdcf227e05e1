from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import tokenizers
import zmq

from sglite.errors import EngineDead, InvalidGrammar, InvalidRequest, ModelNotFound
from sglite.protocol import GenerateRequest, GrammarSpec, ModelInfo, RequestOutput, SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine import process as process_module
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.process import ProcessBack, TokenizerBeside
from sglite.runtime.config import EngineConfig
from tests.fakes.tokenizer import ByteTokenizer

BUILDER = "tests.fakes.core:build_scripted"


def started(*, served_name: str | None = None, restart: bool = False, front: Front | None = None) -> Engine:
    front = front or Front()
    back = ProcessBack(
        EngineConfig(served_name=served_name),
        front,
        restart=restart,
        builder=BUILDER,
        load_tokenizer=lambda ready: ByteTokenizer(),
    )
    ready = back.start()
    return Engine.over(front, back, ready.tokenizer, ready.model_info)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with started() as engine:
        yield engine


def process_of(engine: Engine) -> psutil.Process:
    return psutil.Process(engine._back.pid)  # type: ignore[attr-defined]


async def test_requests_errors_and_calls_cross_the_process(engine: Engine) -> None:
    assert engine.generate("größe").text == "größe"
    assert [o.text for o in await engine.generate_async(["a", "b"])] == ["a", "b"]
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate("")
    with pytest.raises(InvalidGrammar):
        await engine.compile_grammar(GrammarSpec(kind="regex", source="bad"))
    assert await engine.flush_cache() is True
    assert engine.score("p", ["ab"]).logprobs == ((-97.0, -98.0),)


def test_progress_is_shown_and_a_failed_start_raises_its_error() -> None:
    seen: list[str] = []
    front = Front()
    front.on_progress = seen.append
    with pytest.raises(ModelNotFound, match="no such model"):
        started(served_name="fail", front=front)
    assert seen == ["loading the script"]


def test_a_killed_engine_is_reported_within_two_seconds() -> None:
    engine = started(served_name="slow")
    stream = engine.stream("x" * 1000, SamplingParams())
    next(stream)
    process_of(engine).kill()
    begin = time.monotonic()
    with pytest.raises(EngineDead, match="SIGKILL"):
        list(stream)
    with pytest.raises(EngineDead):
        engine.generate("later")
    assert time.monotonic() - begin < 2
    assert not engine.alive
    engine.close()


def test_an_engine_that_may_restart_answers_again() -> None:
    with started(restart=True) as engine:
        first = process_of(engine)
        first.kill()
        end = time.monotonic() + 20
        while True:
            try:
                assert engine.generate("again").text == "again"
                if engine._back.pid != first.pid:  # type: ignore[attr-defined]
                    break
            except EngineDead:
                pass
            assert time.monotonic() < end
            time.sleep(0.02)


class Silent:
    """A back whose child is a process that does nothing; what it says is said here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, restart: bool = False) -> None:
        program = folder / "silent"
        program.write_text("#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        self.front = Front()
        self.back = ProcessBack(EngineConfig(), self.front, restart=restart, load_tokenizer=self.tokenizer)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.PUSH)
        self._events.connect(f"ipc://{self.back._child.folder}/events")

    def tokenizer(self, ready: m.Ready) -> ByteTokenizer:
        return ByteTokenizer()

    def says(self, event: m.Event) -> None:
        self._events.send(m.encode([event]))

    def end(self) -> None:
        """The back ends at once, with its child."""
        closing = threading.Thread(target=self.back.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
        assert not psutil.pid_exists(self.back.pid)
        self._context.destroy(0)


READY = m.Ready(ModelInfo(name="silent", vocab_size=8))


def test_an_engine_that_waits_to_restart_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "RESTART_DELAYS_S", (1000.0,))
    silent = Silent(tmp_path, monkeypatch, restart=True)
    silent.says(READY)
    silent.back.start()
    silent.back._child.process.kill()
    while silent.front.router.failure is None:
        time.sleep(0.001)
    silent.end()
    assert "closed" in str(silent.front.router.failure)


@pytest.mark.parametrize("raised", [ValueError("not now"), KeyboardInterrupt()])
def test_what_a_callback_raises_is_raised_by_the_start(
    raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Silent(tmp_path, monkeypatch)

    def show(text: str) -> None:
        raise raised

    silent.front.on_progress = show
    silent.says(m.Progress("loading"))
    with pytest.raises(type(raised)):
        silent.back.start()
    silent.end()


def test_a_start_without_a_tokenizer_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent(tmp_path, monkeypatch)

    def missing(ready: m.Ready) -> ByteTokenizer:
        raise ModelNotFound("no tokenizer")

    monkeypatch.setattr(silent.back, "_load_tokenizer", missing)
    monkeypatch.setattr(process_module, "STOP_S", 0.1)
    silent.says(READY)
    with pytest.raises(ModelNotFound):
        silent.back.start()
    silent.end()


@pytest.mark.parametrize("ready", [True, False])
def test_an_engine_that_loads_or_hangs_can_be_closed(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "STOP_S", 0.1)
    silent = Silent(tmp_path, monkeypatch)
    if ready:
        silent.says(READY)
        silent.back.start()
    else:
        silent.back._thread.start()
    silent.end()


def test_closing_ends_the_process_and_removes_its_folder() -> None:
    engine = started()
    process, folder = process_of(engine), engine._back._child.folder  # type: ignore[attr-defined]
    assert folder.stat().st_mode & 0o777 == 0o700
    engine.close()
    assert not process.is_running()
    assert not folder.exists()


def test_no_engine_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from tests.runtime.test_engine_process import started\n"
        "engine = started()\n"
        "print(engine._back.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}, cwd=root
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    child.wait(5)


def test_frames_hold_only_messages_of_the_protocol() -> None:
    commands: list[m.Command] = [
        m.Generate(
            GenerateRequest(
                request_id="r", prompt=(1, 2), sampling_params=SamplingParams(logit_bias={3: -1.0}, stop=("x",))
            )
        ),
        m.Abort("r"),
        m.Stop(),
    ]
    assert m.decode_commands(m.encode(commands)) == commands
    events: list[m.Event] = [m.Outputs((RequestOutput(request_id="r", text="ü", token_ids=(1,), matched_stop=2),))]
    assert m.decode_events(m.encode(events)) == events
    with pytest.raises(msgspec.ValidationError):
        m.decode_commands(b"\x91\x81\xa4type\xa6pickle")


def test_the_front_loads_a_folders_tokenizer_beside_its_child(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, words in ((here, {"a": 0, "b": 1}), (elsewhere, {"c": 0})):
        folder.mkdir()
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        backend.decoder = tokenizers.decoders.Metaspace()
        backend.save(str(folder / "tokenizer.json"))
    beside = TokenizerBeside(EngineConfig(model=str(here)))
    info = ModelInfo(
        name="x", architecture="X", vocab_size=2, max_model_len=8, bos_token_id=None, stop_token_ids=(),
        has_chat_template=False,
    )  # fmt: skip
    assert beside(m.Ready(info, {"tokenizer_folder": str(here)})).vocab_size == 2
    assert beside(m.Ready(info, {"tokenizer_folder": str(elsewhere)})).vocab_size == 1
    other = TokenizerBeside(EngineConfig(model="a name and no folder"))
    assert other(m.Ready(info, {"tokenizer_folder": str(here)})).vocab_size == 2
