from __future__ import annotations

import pytest

from sglite.bench.calibrate import Rates
from sglite.bench.floors import ModelCost, floor_seconds
from sglite.bench.workloads import workload
from sglite.errors import InvalidRequest
from sglite.runtime.models.config import ModelConfig

RATES = Rates(copy=4.3e12, matmul=790e12)
QWEN3_8B = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
)
COST = ModelCost.of(QWEN3_8B, itemsize=2)


def test_a_step_reads_the_weights_once_and_the_rows_kv() -> None:
    assert COST.step(RATES, kv_tokens=0) * RATES.copy == pytest.approx(15.1e9, rel=0.01)
    assert COST.kv_bytes == 144 << 10


@pytest.mark.parametrize(("name", "tokens_per_second"), [("free_1", 284), ("free_32", 7800), ("free_256", 31000)])
def test_floors_of_decoding(name: str, tokens_per_second: float) -> None:
    load = workload(name)
    assert load.rows * load.output / floor_seconds(load, COST, RATES) == pytest.approx(tokens_per_second, rel=0.05)


def test_floor_of_a_prefill_is_its_products_and_its_attention() -> None:
    assert floor_seconds(workload("prefill_16x4k"), COST, RATES) == pytest.approx(1.26, rel=0.02)


def test_a_shared_prefix_is_read_once() -> None:
    load = workload("fork64_8k")
    assert load.rows * load.output / floor_seconds(load, COST, RATES) == pytest.approx(15000, rel=0.1)


def test_prompts_differ_from_run_to_run_and_share_their_prefix() -> None:
    prefix, prompts = workload("fork64_8k").prompts(1000, seed=1)
    assert len(prefix) == 8192 and len(prompts) == 64
    assert all(prompt[:8192] == prefix and len(prompt) == 8208 for prompt in prompts)
    assert workload("free_1").prompts(1000, seed=1) != workload("free_1").prompts(1000, seed=2)


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="prefill_16x4k"):
        workload("free")
