"""Whether code that waits does so inside a `with` block: it may hold a lock there.

    with lock:
        results.append(s["answer"])

Were the thread given to another function meanwhile, and that one wanted the lock too, it would stop the thread, and
with it the one that has the lock: both would wait for ever.

CPython tells where a frame stands; the exception table of its code tells which `with` blocks reach over that place
(their handlers begin with PUSH_EXC_INFO, WITH_EXCEPT_START).
"""

from __future__ import annotations

import asyncio
import opcode
import os
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

_HANDLER = (opcode.opmap["PUSH_EXC_INFO"], opcode.opmap["WITH_EXCEPT_START"])
# Their blocks hold nothing that a program could wait for.
_OTHERS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), asyncio.__file__))


def open_blocks(frame: FrameType | None, end: CodeType) -> int:
    """`with` blocks that a frame and its callers stand in, up to the frame of `end`."""
    found = 0
    while frame is not None and frame.f_code is not end:
        if frame.f_code.co_exceptiontable:
            found += _open_at(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return found


@lru_cache(maxsize=4096)
def _open_at(code: CodeType, at: int) -> int:
    """The table has the innermost handler of a place; that of a handler's place is the next one outwards."""
    if code.co_filename.startswith(_OTHERS):
        return 0
    table, seen = list(_exception_table(code.co_exceptiontable)), set[int]()
    while (handler := next((h for start, end, h in table if start <= at < end), None)) not in (None, *seen):
        assert handler is not None
        seen.add(handler)
        at = handler
    return sum((code.co_code[handler], code.co_code[handler + 2]) == _HANDLER for handler in seen)


def _exception_table(table: bytes) -> Iterator[tuple[int, int, int]]:
    """(start, end, handler). The format: CPython's Objects/exception_handling_notes.txt."""
    numbers = _numbers(table)
    for start, length, handler, _ in zip(numbers, numbers, numbers, numbers, strict=False):
        yield 2 * start, 2 * (start + length), 2 * handler


def _numbers(table: bytes) -> Iterator[int]:
    """Six bits a byte, the highest first; bit 6 says that another byte follows."""
    value = 0
    for byte in table:
        value = value << 6 | byte & 63
        if not byte & 64:
            yield value
            value = 0
