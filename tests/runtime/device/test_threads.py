from __future__ import annotations

import subprocess
import sys

from sglite.runtime.device.threads import limit_spinning


def test_waiting_threads_spin_for_a_short_time_only() -> None:
    environ: dict[str, str] = {}
    limit_spinning(environ, loaded=())
    assert environ == {"GOMP_SPINCOUNT": "2000"}


def test_what_the_user_set_and_a_torch_that_is_loaded_are_left_alone() -> None:
    for given in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        environ = dict(given)
        limit_spinning(environ, loaded=())
        assert environ == given
    environ = {}
    limit_spinning(environ, loaded={"torch"})
    assert environ == {}


def test_an_engine_limits_it_before_torch_is_imported() -> None:
    code = """
import importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":  # the last one who asks is the one who loads it
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
sys.meta_path.insert(0, Watch())
import sglite
sglite.Engine(model="no-such-model", device="cpu")
"""
    environ = {"PATH": "/usr/bin:/bin"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip().endswith("2000"), found.stderr
