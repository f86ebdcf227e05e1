from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import sglite
from sglite import errors


def test_every_listed_name_is_there() -> None:
    for name in sglite.__all__:
        assert getattr(sglite, name) is not None, name


def test_type_checkers_see_the_same_names() -> None:
    stub = Path(sglite.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r" as (\w+)", stub)) == set(sglite.__all__)


def test_every_error_of_the_tree_is_public() -> None:
    tree = {name for name, cls in errors.error_types().items() if cls.__module__ == "sglite.errors"}
    assert tree <= set(sglite.__all__)


def test_names_come_from_where_they_are_defined() -> None:
    assert sglite.InvalidRequest is errors.InvalidRequest
    assert not hasattr(sglite, "no_such_name")
    assert set(dir(sglite)) == set(sglite.__all__)


def test_import_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import sglite; took = time.perf_counter() - began\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(took)"
    )
    best = min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout)
        for _ in range(3)
    )
    assert best < 0.3


def test_writing_a_program_loads_no_torch() -> None:
    code = "import sys, sglite; sglite.function; sglite.gen; sglite.select; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
