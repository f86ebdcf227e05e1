from __future__ import annotations

import weakref
from typing import Any

import pytest

from sglite.bench.structured import whole


class Memory:
    """What an engine holds."""


def test_a_part_that_fails_loses_no_other_and_finds_the_memory_of_those_before_it_free() -> None:
    written: list[dict[str, Any]] = []
    held: list[weakref.ref[Memory]] = []

    def first() -> dict[str, Any]:
        memory: Any = Memory()
        memory.itself = memory
        held.append(weakref.ref(memory))
        return {"rows": [1]}

    def second() -> dict[str, Any]:
        assert held[0]() is None
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        whole.measure([first, second], lambda report: written.append(dict(report)))
    assert written == [{"rows": [1]}]
