"""What takes long before the first step and needs no interpreter: done in a thread while the interpreter is busy.

Mapping and relocating torch's libraries (2 GB with CUDA) takes 0.4 s, in which an importing thread holds the
interpreter lock; the loader called as a foreign function holds none, nor does the driver while it makes a GPU's context
(0.2 s). `import torch` then finds both in place; where anything is different from what is assumed here, it does what it
always does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = "libtorch.so"  # brings in all others that hold no Python


def begin_loading_torch(*, gpu: int | None) -> None:
    """Returns at once. A no-op where torch is imported already or has no such library (macOS, Windows). `gpu`: also
    make the context of that one, if there is a driver."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    spec = importlib.util.find_spec("torch")
    libraries = [Path(folder) / "lib" / _LIBRARY for folder in (spec and spec.submodule_search_locations) or ()]
    found = [library for library in libraries if library.is_file()]
    # No daemon: a process that ends at once (no such model) waits for it, since libraries that are being set up while
    # the process takes its others down crash it.
    threading.Thread(target=_load, args=(found, gpu), name="sglite-load-torch", daemon=False).start()


def _load(libraries: list[Path], gpu: int | None) -> None:
    loader = ctypes.CDLL(None).dlopen
    loader.restype = ctypes.c_void_p
    loader.argtypes = [ctypes.c_char_p, ctypes.c_int]
    for library in libraries:
        loader(os.fsencode(library), os.RTLD_LAZY)  # it stays for good, as after an import
    for_gpus = any((library.parent / "libtorch_cuda.so").is_file() for library in libraries)
    if gpu is not None and for_gpus and has_gpu_driver():
        with contextlib.suppress(OSError):  # a driver without its library: torch will say so
            driver = ctypes.CDLL("libcuda.so.1")
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), gpu) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # the one that torch will use


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """A start makes a million objects and hardly any garbage, over which the collector would go again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def has_gpu_driver() -> bool:
    """Whether a GPU's driver is there, as far as can be told without torch."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))
