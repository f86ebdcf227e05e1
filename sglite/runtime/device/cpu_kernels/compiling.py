"""How the kernels are compiled, and kept on disk for the next process."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock
from llvmlite import binding
from numba import config, njit

logger = logging.getLogger(__name__)

LOCK = "compiling.lock"  # beside what is kept
_WAIT_S = 120.0

_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # sums may be vectorised; infinities and NaN keep their meaning
    "boundscheck": False,
    "error_model": "numpy",
}


if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")


def compiled(signature: str) -> Callable[[Any], Any]:
    """Compile now, or load what an earlier process compiled. Says so where it takes long."""

    def compile_now(function: Any) -> Any:
        function.__qualname__ = f"{function.__name__}_{_origin()}"
        notice = threading.Timer(3.0, logger.warning, ["compiling the CPU kernels, once for this installation"])
        notice.daemon = True
        notice.start()
        try:
            return _kept(function, signature)
        finally:
            notice.cancel()

    return compile_now


def _kept(function: Any, signature: str) -> Any:
    """The kernel, from the disk where it is there. Whatever the state of the disk, there is a kernel."""
    try:
        return _ready(function, signature, keep=True)
    except (OSError, RuntimeError) as error:  # numba found no folder that it may write to
        _warn_not_kept(error)
    except Exception as error:  # noqa: BLE001 - what is read is unpickled, and damaged files raise anything
        logger.warning("the kept CPU kernels are damaged (%s: %s); compiling them anew", type(error).__name__, error)
        try:
            _forget(function)
            return _ready(function, signature, keep=True)
        except Exception as again:  # noqa: BLE001
            _warn_not_kept(again)
    return _ready(function, signature, keep=False)


def _ready(function: Any, signature: str, *, keep: bool) -> Any:
    kernel = njit(nogil=True, cache=keep, **_OPTIONS)(function)
    with _alone(Path(kernel.stats.cache_path)) if keep else nullcontext():
        try:
            kernel.compile(signature)
        except OSError as error:
            if not kernel.signatures:
                raise
            _warn_not_kept(error)  # it is compiled; what failed is the writing
    kernel.disable_compile()
    return kernel


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of processes that start together without kernels one compiles and the others load what it kept. Where there is no
    lock to be had, or its holder takes too long, everybody compiles."""
    lock = FileLock(folder / LOCK, timeout=_WAIT_S)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a time-out is an OSError too
        logger.info("compiling the CPU kernels beside other processes: %s", error)
    try:
        yield
    finally:
        lock.release()


def _forget(function: Any) -> None:
    """Remove what the cache has of this kernel."""
    folder = Path(njit(cache=True, **_OPTIONS)(function).stats.cache_path)
    for file in folder.glob(f"*.{function.__qualname__}-*.nb[ci]"):
        file.unlink(missing_ok=True)


def _warn_not_kept(error: Exception) -> None:
    logger.warning("the compiled CPU kernels cannot be kept (%s); set NUMBA_CACHE_DIR to a folder with room", error)


def _origin() -> str:
    """Of this package's text and this machine's processor. Part of a kernel's name in the cache: numba itself looks at
    the kernel's own file only, and machines that share a folder could take each other's code."""
    digest = hashlib.sha256(binding.get_host_cpu_name().encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def inline(function: Any) -> Any:
    return njit(**_OPTIONS)(function)
