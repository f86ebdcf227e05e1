"""Kernels are compiled before the first request, once on a machine.

Triton compiles a kernel when it is first launched, which takes 0.3 to 2 seconds, and again for other constants and for
numbers that are or are not multiples of 16. What it has compiled stays on disk, so that all this happens once: where a
mark beside the kernels is missing, the engine goes through the kinds of steps that there are, with launches that only
compile, in many threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_TOLD_EVERY = 2.0  # seconds


def mark(folder: Path, *facts: object) -> Path:
    """The file that says that everything is compiled: for this source and whatever else `facts` tell of."""
    digest = hashlib.sha256(repr((triton.__version__, facts)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return folder / f"sglite-{digest.hexdigest()[:20]}.compiled"


@contextmanager
def only_compiling(threads: int, progress: Callable[[str], None]) -> Iterator[None]:
    """Launches of Triton kernels by this thread run nothing: they compile what is missing, in other threads. At the end
    all of it is there. Raises what compiling raises."""
    run, owner = JITFunction.run, get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or get_ident() == owner, **kwargs)

    JITFunction.run = compile_only
    try:
        with _Pool(threads) as pool, triton.AsyncCompileMode(pool):
            yield
            pool.finish(progress)
    finally:
        JITFunction.run = run


class _Pool(ThreadPoolExecutor):
    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="sglite-compile")
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._futures.append(future)
        return future

    def finish(self, progress: Callable[[str], None]) -> None:
        """Wait for all, and tell how far it is."""
        left, told = set(self._futures), 0.0
        while left:
            if time.monotonic() - told > _TOLD_EVERY:
                told, total = time.monotonic(), len(self._futures)
                progress(f"compiling kernels, once on this machine: {total - len(left)} of {total}")
            left = wait(left, timeout=0.1).not_done
