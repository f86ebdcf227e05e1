"""`--quick` leaves out the tests named in lengthy.txt: few, but they take most of the time. A file named there as a
whole is not even imported: the clients of OpenAI and Anthropic, and transformers, take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

_LENGTHY = Path(__file__).with_name("lengthy.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests named in tests/lengthy.txt")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick"):
        return None
    return True if str(collection_path.relative_to(config.rootpath)) in _lengthy() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    lengthy = _lengthy()
    kept, left_out = [], []
    for item in items:
        (left_out if item.nodeid.partition("[")[0] in lengthy else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _lengthy() -> frozenset[str]:
    return frozenset(_LENGTHY.read_text(encoding="utf-8").splitlines())
