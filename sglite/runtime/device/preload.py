"""torch's libraries on their way into the process while the interpreter does something else.

Mapping and relocating them is a large part of `import torch`, 2 GB with CUDA, and the importing thread holds the
interpreter lock all the time. The loader itself called as a foreign function holds none. `import torch` then finds them
in place; where anything is different here from what is assumed, it does what it always does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

_LIBRARY = "libtorch.so"  # brings in all others that hold no Python


def begin_loading_torch() -> None:
    """Returns at once. A no-op where torch is imported already or has no such library (macOS, Windows)."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder) / "lib" / _LIBRARY
        if library.is_file():
            threading.Thread(target=_load, args=(library,), name="sglite-load-torch", daemon=True).start()


def _load(library: Path) -> None:
    loader = ctypes.CDLL(None).dlopen
    loader.restype = ctypes.c_void_p
    loader.argtypes = [ctypes.c_char_p, ctypes.c_int]
    loader(os.fsencode(library), os.RTLD_LAZY)  # it stays for good, as after an import


def has_gpu_driver() -> bool:
    """Whether a GPU's driver is there, as far as can be told without torch."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))
