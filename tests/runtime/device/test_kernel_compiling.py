"""Kernels that are compiled ahead: what tells sets of them apart, and launches that only compile."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from sglite.runtime.device.cuda.compiling import mark, only_compiling


def test_a_mark_is_of_this_model_in_these_sizes(tmp_path: Path) -> None:
    assert mark(tmp_path, "qwen", 256) == mark(tmp_path, "qwen", 256)
    assert len({mark(tmp_path, *facts) for facts in (("qwen", 256), ("qwen", 8), ("llama", 256))}) == 3
    assert mark(tmp_path, 1).parent == tmp_path


def test_this_threads_launches_compile_and_those_of_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, bool]] = []

    def run(self: Any, name: str, *, grid: Any, warmup: bool) -> None:
        found.append((name, warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    launch: Any = JITFunction.run
    with only_compiling(2, pytest.fail):
        JITFunction.run(None, "mine", grid=(1,), warmup=False)  # type: ignore[arg-type]
        other = Thread(target=lambda: JITFunction.run(None, "other", grid=(1,), warmup=False))  # type: ignore[arg-type]
        other.start()
        other.join()
    assert found == [("mine", True), ("other", False)]
    assert JITFunction.run is launch


def test_launches_run_again_after_one_could_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = JITFunction.run
    with pytest.raises(ValueError, match="no such kernel"), only_compiling(1, lambda _: None):
        raise ValueError("no such kernel")
    assert JITFunction.run is before
