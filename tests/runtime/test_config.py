from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglite.errors import InvalidRequest
from sglite.protocol import SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import Limits, ServerConfig


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_threads", 0, "at least 1, not 0"),
        ("max_rows", -1, "at least 1, not -1"),
        ("lease_s", -0.5, "at least 0, not -0.5"),
        ("hold_s", float("nan"), "at least 0, not nan"),
        ("memory_fraction", 1.5, "at most 1"),
        ("num_threads", 10_000, "at most 1024, not 10000"),
        ("max_rows", 10**12, "at most 65536"),
        ("num_pages", 10**12, "at most 2147483647"),
        ("page_size", 2**40, "at most 65536"),
        ("kv_memory", float("inf"), "at most 1048576, not inf"),
        ("max_rows", "8", "a whole number, not '8'"),
        ("max_rows", 8.0, "a whole number, not 8.0"),
        ("max_rows", True, "a whole number, not True"),
        ("max_rows", None, "a whole number, not None"),
        ("kv_memory", "4GB", "a number, not '4GB'"),
        ("prefix_cache", 1, "true or false, not 1"),
        ("model", 3, "a text, not 3"),
        ("dtype", "fp32", "one of auto, float32, bfloat16, float16, int8, not 'fp32'"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be .*{said}") as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["tensor_parallel", "tp_size", "tensor_parallel_size"])
def test_a_model_over_several_gpus_is_refused_not_ignored(name: str) -> None:
    with pytest.raises(InvalidRequest, match="tensor_parallel=2.*one engine for each GPU"):
        Engine(**{name: 2})


@pytest.mark.parametrize("bias", [1e300, -1e300, float("inf"), float("nan"), 1e21])
def test_a_bias_that_no_float32_holds_is_refused_before_it_is_a_nan_of_the_model(bias: float) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias values must lie between -1e\+20 and 1e\+20"):
        SamplingParams(logit_bias={3: bias})


def test_paths_and_numbers_of_other_libraries_are_taken() -> None:
    config = EngineConfig(model=Path("some/where"), max_rows=np.int64(8), kv_memory=2)  # type: ignore[arg-type]
    assert (config.model, config.max_rows, config.kv_memory) == (str(Path("some/where")), 8, 2)


@pytest.mark.parametrize(("written", "meant"), [("max_row", "max_rows"), ("mem_fracton_static", "mem_fraction_static")])
def test_a_misspelled_option_is_told_the_right_one(written: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown option '{written}'; did you mean {meant}") as caught:
        Engine(**{written: 1})
    assert "known: access_log" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ServerConfig(port=99_999), "port must be at most 65535"),
        (ServerConfig(port=-1), "port must be at least 0"),
        (ServerConfig(max_running=0), "max_running must be at least 1"),
        (ServerConfig(write_timeout_s=0), "write_timeout_s must be at least 0.001"),
        (ServerConfig(engine="fork"), "engine must be one of auto, thread, process"),
        (ServerConfig(served_model_name=3), "served_model_name must be a text"),  # type: ignore[arg-type]
        (ServerConfig(limits=Limits(max_n=0)), "max_n must be at least 1"),
    ],
)
def test_a_servers_options_are_checked_when_it_starts(config: ServerConfig, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        config.check()
