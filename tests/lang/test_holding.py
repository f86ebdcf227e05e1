"""Which `with` blocks code stands in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress

from sglite.lang.holding import open_blocks


def here() -> int:
    return open_blocks(sys._getframe(1), outermost.__code__)


def straight() -> list[int]:
    found = [here()]
    with nullcontext():
        found.append(here())
        with nullcontext(), suppress(ValueError):
            found.append(here())
        found.append(here())
    return [*found, here()]


def around_errors() -> list[int]:
    found: list[int] = []
    with nullcontext():
        try:
            for _ in range(1):
                found.append((lambda: here())())
            raise KeyError
        except KeyError:
            found.append(here())
        finally:
            found.append(here())
        with suppress(ValueError):
            raise ValueError
        found.append(here())
    return [*found, here()]


def left_by_return() -> int:
    with nullcontext():
        return here()


def generated() -> Iterator[int]:
    with nullcontext():
        yield here()
    yield here()


def outermost() -> list[list[int]]:
    with nullcontext():  # is not looked at
        return [straight(), around_errors(), [left_by_return()], list(generated())]


def test_blocks_are_counted_from_a_place_to_the_outermost_function() -> None:
    assert outermost() == [[0, 1, 3, 1, 0], [1, 1, 1, 1, 0], [1], [1, 0]]
