"""Programs and calls against one server: what is asked for in each way, and that no server is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglite.bench.programs import served, stands
from sglite.bench.programs.record import Recorder
from sglite.bench.programs.run import Bench
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.stands import SERVER_WAYS, ServerStand
from sglite.bench.programs.workloads import workload
from sglite.errors import BackendError, InvalidRequest
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import ServerConfig
from tests.fakes.tiny_folder import tiny_folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    with Engine(model=str(folder), load_format="dummy", device="cpu", num_pages=8000, max_rows=32) as made:
        yield made


@pytest.fixture(scope="module")
def stand(engine: Engine) -> Iterator[ServerStand]:
    with served.in_thread(Recorder(engine), ServerConfig(port=0, log_requests=False)) as url:
        made = ServerStand(url)
        yield made
        made.close()


@pytest.mark.parametrize("name", ["skeleton_of_thought", "hellaswag", "react", "rag_json"])
def test_all_ways_ask_one_server_for_the_same(stand: ServerStand, name: str) -> None:
    load = workload(name, Texts(stand.tokenizer, Shape(scale=0.05, pause_scale=0.001, share=0.01)))
    arguments = load.arguments(2)
    programs, text, ids = (stand.run_once(load, arguments, way, 2) for way in SERVER_WAYS)
    # a prefix is warmed by a call that generates nothing
    generated = [sum(c.generates and any(c.answers) for c in way.calls) for way in (programs, text, ids)]
    assert generated[0] == generated[1] == generated[2]
    written = [sum(len(a) for c in way.calls if c.generates for a in c.answers) for way in (programs, text, ids)]
    if name != "rag_json":  # whose length is the model's to say
        assert written[0] == written[1] == written[2]
    options = [sum(len(c.answers) for c in way.calls if not c.generates) for way in (programs, text, ids)]
    assert options[0] == options[1] == options[2]
    assert len({c.program for c in text.calls}) == len({c.program for c in ids.calls}) == len(arguments)
    assert programs.counts["admissions"] <= load.branches() * len(arguments) + 2


def test_a_way_that_there_is_not_is_refused(engine: Engine) -> None:
    bench = Bench(EngineConfig(), Shape(), repeat=1, warm=False, process=False, note=print, ways=["text"])
    with pytest.raises(InvalidRequest, match="no way 'text' here; there are programs, calls"):
        bench._chosen(stands.EngineStand(engine))


def pretending(body: str) -> tuple[str, ...]:
    """A process in place of the server; it tells its id in a file."""
    return (sys.executable, "-c", f"import os, sys, time\nopen({{0!r}}, 'w').write(str(os.getpid()))\n{body}")


WAITS = "print('http://127.0.0.1:9', flush=True)\nsys.stdin.read()"
HANGS = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAITS + "\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("body", "error"),
    [("sys.exit(3)", BackendError), (WAITS, BackendError), (WAITS, KeyboardInterrupt), (HANGS, KeyboardInterrupt)],
)
def test_no_server_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: type[BaseException]
) -> None:
    note = tmp_path / "pid"
    python, flag, code = pretending(body)
    monkeypatch.setattr(stands, "CLOSE_S", 0.3)
    monkeypatch.setattr(stands, "_await_listening", lambda url: None)

    def interrupted(url: str) -> ServerStand:
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt
        raise BackendError(f"{url} does not answer")

    monkeypatch.setattr(stands, "ServerStand", interrupted)
    with pytest.raises(error):
        with stands.server(EngineConfig(), command=(python, flag, code.format(str(note)))):
            pass
    assert not runs(int(note.read_text()))


def test_a_server_ends_with_the_process_that_started_it() -> None:
    code = "from sglite.bench.programs.served import end_with_stdin\nprint('up', flush=True)\nend_with_stdin()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdin.close()
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()


def runs(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True
