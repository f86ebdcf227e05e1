"""Files that commands are given."""

from __future__ import annotations

import sys
from pathlib import Path

from sglite.errors import InvalidRequest


def read_bytes(name: str) -> bytes:
    """`-`: standard input. Raises InvalidRequest."""
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        hint = "; give a file, or - and the JSON on standard input" if name.lstrip()[:1] in ("{", "[") else ""
        raise InvalidRequest(f"{name} cannot be read: {error.strerror}{hint}") from error


def read_text(name: str) -> str:
    """The same, of UTF-8."""
    try:
        return read_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error}") from error
