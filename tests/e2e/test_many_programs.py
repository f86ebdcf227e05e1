"""A thousand programs at once in one process, on a real engine with a tiny model."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sglite as sgl
from tests.fakes.tiny_folder import tiny_folder

NUMBER = 1000
BROKEN = {17, 400, 999}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("tiny"))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_pages": 40_000, "max_rows": 128}
    with sgl.Engine(model=str(folder), num_threads=1, **options) as made:
        yield made


@sgl.function
def agent(s: Any, number: int) -> str:
    s += f"Question {number} of a thousand:" + sgl.gen("thought", max_tokens=6, temperature=0, ignore_eos=True)
    if number in BROKEN:
        raise ValueError(f"program {number} is broken")
    s += " choose" + sgl.select("tool", [" one", " two"])
    forks = s.fork(2)
    forks += sgl.gen("answer", max_tokens=4, temperature=0, ignore_eos=True)
    forks.join()
    return f"{s['thought']}|{s['tool']}|{s['answer']}"


class Watch:
    """The most threads and bytes of this process while the body runs."""

    def __enter__(self) -> Watch:
        self.threads = self.bytes = 0
        self._over = False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        process = psutil.Process()
        while not self._over:
            self.threads = max(self.threads, process.num_threads())
            self.bytes = max(self.bytes, process.memory_info().rss)
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()


@pytest.mark.slow
def test_a_thousand_programs_run_at_once_on_few_threads_in_flat_memory(engine: sgl.Engine) -> None:
    arguments = [{"number": number} for number in range(NUMBER)]
    alone = [agent.run(number=number, backend=engine).ret_value for number in (0, 500)]
    peaks: list[int] = []
    for _ in range(3):
        with Watch() as watch:
            states = agent.run_batch(arguments, backend=engine, num_threads=NUMBER, on_error="return")
        failed = {i for i, state in enumerate(states) if state.error() is not None}
        assert failed == BROKEN
        for number in BROKEN:
            assert isinstance(states[number].error().__cause__, ValueError)
        assert [states[number].ret_value for number in (0, 500)] == alone
        assert all(state.ret_value.count("|") == 2 for i, state in enumerate(states) if i not in BROKEN)
        assert watch.threads < 50
        peaks.append(watch.bytes)
        del states
        gc.collect()
    assert peaks[2] - peaks[0] < 100 << 20
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["held"]) == (0, 0, 0)
    assert stats["pages_owned"] == 0 and stats["pages_protected"] == 0
