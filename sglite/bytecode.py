"""Python's byte code where Python keeps none.

Container images often set PYTHONDONTWRITEBYTECODE, and their packages come without byte code. Then every start compiles
the 1,100 modules that `import torch` brings in, which takes longer than to run them. What is compiled once is kept in
sglite's own folder, for its own imports and processes, and checked against the sources as always.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator

from sglite.home import home


def folder() -> str | None:
    """Where byte code is to be kept; None where Python keeps it by itself or is told where (PYTHONPYCACHEPREFIX)."""
    ours = str(home() / "bytecode")
    if sys.pycache_prefix is not None:
        return ours if sys.pycache_prefix == ours else None
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # something else stands in for it
        return None
    if spec is None or spec.origin is None or os.path.exists(importlib.util.cache_from_source(spec.origin)):
        return None
    will_be = not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)
    return None if will_be else ours


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Imports in here are kept. For the whole process, while it lasts."""
    where = folder()
    if where is None:
        yield
        return
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = False, where
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before


def environment() -> dict[str, str]:
    """For a process of ours: it keeps all that it imports."""
    variables, where = dict(os.environ), folder()
    if where is not None:
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables["PYTHONPYCACHEPREFIX"] = where
    return variables
