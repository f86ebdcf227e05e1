"""How the kernels are compiled, and kept on disk for the next process."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

logger = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # sums may be vectorised; infinities and NaN keep their meaning
    "boundscheck": False,
    "error_model": "numpy",
}


def compiled(signature: str) -> Callable[[Any], Any]:
    """Compile now, or load what an earlier process compiled. Says so where it takes long."""

    def compile_now(function: Any) -> Any:
        function.__qualname__ += f"_{_sources_digest()}"
        notice = threading.Timer(3.0, logger.warning, ["compiling the CPU kernels, once for this installation"])
        notice.daemon = True
        notice.start()
        try:
            return njit(signature, cache=True, nogil=True, **_OPTIONS)(function)
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            logger.warning("the compiled CPU kernels cannot be kept (%s); set NUMBA_CACHE_DIR", error)
            return njit(signature, nogil=True, **_OPTIONS)(function)
        finally:
            notice.cancel()

    return compile_now


def _sources_digest() -> str:
    """Of this package. Part of a kernel's name in the cache: numba itself looks at the kernel's own file only."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def inline(function: Any) -> Any:
    return njit(**_OPTIONS)(function)
