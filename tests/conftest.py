"""`--quick` leaves out the tests named in lengthy.txt: few, but they take most of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

_LENGTHY = Path(__file__).with_name("lengthy.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests named in tests/lengthy.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    lengthy = frozenset(_LENGTHY.read_text(encoding="utf-8").splitlines())
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_lengthy = name in lengthy or name.partition("::")[0] in lengthy
        (left_out if is_lengthy else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
