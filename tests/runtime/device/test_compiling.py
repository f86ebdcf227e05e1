"""A kernel is there whatever the state of the folder in which compiled ones are kept."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numba
import pytest
from filelock import FileLock

from sglite.runtime.device.cpu import load_kernels
from sglite.runtime.device.cpu_kernels.compiling import LOCK, compiled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def make_kernel() -> Any:
    def plus(a: int, b: int) -> int:
        return a + b

    return compiled("int64(int64, int64)")(plus)


def kept(folder: Path) -> dict[str, Path]:
    """By their ending: the index and the code."""
    return {file.suffix: file for file in folder.rglob("*.nb?")}


def test_it_is_kept_for_the_next_process(folder: Path) -> None:
    assert make_kernel()(2, 3) == 5
    assert sorted(kept(folder)) == [".nbc", ".nbi"]
    again = make_kernel()
    assert again(2, 3) == 5
    assert sum(again.stats.cache_hits.values()) == 1
    assert again(2.9, 3) == 5  # of one signature only: other numbers are converted


def test_processes_that_start_together_compile_once(folder: Path) -> None:
    place = Path(make_kernel().stats.cache_path)
    found: list[Any] = []
    other = Thread(target=lambda: found.append(make_kernel()))
    with FileLock(place / LOCK):  # as a process that compiles holds it
        other.start()
        other.join(0.1)
        assert not found
    other.join()
    assert sum(found[0].stats.cache_hits.values()) == 1


def test_a_process_that_holds_the_lock_for_too_long_stops_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(make_kernel().stats.cache_path)
    monkeypatch.setitem(compiled.__globals__, "_WAIT_S", 0.01)  # a test that imports it anew may have run before
    with FileLock(place / LOCK):
        assert make_kernel()(2, 3) == 5


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [b"", b"\x80\x05\x95\x10", b"\xf7 what is this"], ids=["empty", "cut off", "other"])
def test_what_is_damaged_is_compiled_anew(
    folder: Path, ending: str, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    make_kernel()
    kept(folder)[ending].write_bytes(damage)
    assert make_kernel()(2, 3) == 5
    assert "damaged" in caplog.text
    assert sum(make_kernel().stats.cache_hits.values()) == 1  # mended


def test_a_full_disk_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    assert make_kernel()(2, 3) == 5
    assert "cannot be kept ([Errno 28] No space left on device)" in caplog.text


def test_a_folder_that_cannot_be_written_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert make_kernel()(2, 3) == 5
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_where_numba_is_switched_off_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("sglite.runtime.device.cpu_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)  # NUMBA_DISABLE_JIT
    assert load_kernels(1) is None
    assert "NUMBA_DISABLE_JIT is set" in caplog.text
    assert "pip install" not in caplog.text
