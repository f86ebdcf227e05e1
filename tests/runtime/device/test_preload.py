from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, threading
from sglite.runtime.device.preload import begin_loading_torch
begin_loading_torch(gpu=0)
assert "torch" not in sys.modules
loading = [t for t in threading.enumerate() if t.name == "sglite-load-torch"]
for thread in loading:
    thread.join()
mapped = any("libtorch_cpu" in line for line in open("/proc/self/maps"))
import torch
assert torch.ones(2).sum() == 2
begin_loading_torch(gpu=None)
print(mapped)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="loads nothing elsewhere")
def test_torch_is_mapped_before_it_is_imported_and_works() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="loads nothing elsewhere")
def test_a_process_that_ends_while_torch_is_mapped_ends_in_order() -> None:
    code = (
        "import time; from sglite.runtime.device.preload import begin_loading_torch; "
        "begin_loading_torch(gpu=None); time.sleep(0.05); exit(7)"  # in the midst of it
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")


def test_building_an_engine_needs_no_torch_until_the_weights() -> None:
    code = "import sys, sglite.runtime.async_engine.build; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
