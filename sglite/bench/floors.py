"""The time below which a workload cannot be done on a machine of the given rates.

a decode step   reads the weights once (not the input embedding, unless it is the output projection too) and the
                KV of its rows: bytes / copy rate. A prefix that rows share is read once.
a prefill       2 operations per weight and token, and 4 * heads * head_dim per layer and attended pair: at the
                matmul rate. The output projection counts for the last token of a row only.
a workload      its prefill and the sum of its steps: the first of `output` tokens comes from the prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglite.bench.calibrate import Rates
from sglite.bench.workloads import Workload
from sglite.runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelCost:
    layer_weights: int  # parameters of all layers' projections
    output_weights: int
    kv_bytes: int  # of a token, all layers
    pair_operations: int  # of one attended (query, key) pair, all layers
    weight_bytes: int  # of one parameter

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int) -> ModelCost:
        attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
        mlp = 3 * config.hidden_size * config.intermediate_size
        return cls(
            layer_weights=config.num_layers * (attention + mlp),
            output_weights=config.hidden_size * config.vocab_size,
            kv_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize,
            pair_operations=4 * config.num_layers * config.num_heads * config.head_dim,
            weight_bytes=itemsize,
        )

    def step(self, rates: Rates, *, kv_tokens: int) -> float:
        """Seconds of one decode step that reads the KV of that many tokens."""
        weights = (self.layer_weights + self.output_weights) * self.weight_bytes
        return (weights + kv_tokens * self.kv_bytes) / rates.copy

    def prefill(self, rates: Rates, *, rows: int, new: int, cached: int) -> float:
        """Seconds to compute `new` tokens of each row behind `cached` ones."""
        pairs = rows * new * (cached + (new + 1) / 2)
        operations = 2 * rows * (new * self.layer_weights + self.output_weights) + pairs * self.pair_operations
        least = (self.layer_weights + self.output_weights) * self.weight_bytes / rates.copy
        return max(operations / rates.matmul, least)


def floor_seconds(load: Workload, cost: ModelCost, rates: Rates) -> float:
    total = cost.prefill(rates, rows=load.rows, new=load.prompt, cached=load.prefix)
    for done in range(1, load.output):
        total += cost.step(rates, kv_tokens=load.prefix + load.rows * (load.prompt + done))
    return total
