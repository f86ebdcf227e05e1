"""Question: from how many rows and how long a prefix on is it faster to read a shared prefix once?

    python -m tests.bench.tree_attention [--models 8b,0.6b] [--rows 4,16,64,256] [--prefixes 512,...,16384] [--own 64]
        [--groups 1] [--common 0] [--out FILE]

Decode attention of one layer (norm, rope and append included), all rows with one prefix in common (or --groups of as
many rows, each with its own, of which --common of 1 is the same for all) and --own tokens of their own, as a CUDA graph
of many layers: each row reading all of its KV, against tree attention, in one run. `chosen` is what the cost model
takes, and `kept` the plain time over the time of that. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglite.runtime.device.base import AttentionLayer, AttentionShape, KVCache, Norm
from sglite.runtime.device.cuda import tree as tree_module
from sglite.runtime.device.cuda import tree_plan
from sglite.runtime.device.cuda.attention import CudaAttention, choose_splits
from sglite.runtime.device.cuda.inputs import MAX_SMALL, CudaForwardBatch, GraphKey, padded
from sglite.runtime.device.inputs import HostInputs
from tests.fakes.batches import Part, make_batch

QUERY_HEADS = {"8b": 32, "0.6b": 16}
KV_HEADS, DIM = 8, 128
LAYERS = 32  # so many that none finds its keys and values in L2 when its turn comes
SLOTS = 40_000  # 164 MB of KV a layer
ALWAYS = tree_plan.Costs(launches=-1e9)


class Bench:
    """One step of rows with a shared prefix, on layers of random keys and values."""

    def __init__(self, model: str) -> None:
        heads = QUERY_HEADS[model]
        self.shape = AttentionShape(LAYERS, heads, KV_HEADS, DIM, DIM**-0.5, torch.bfloat16)
        size = (SLOTS, KV_HEADS, DIM)
        k, v = ([torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)] for _ in range(2))
        self.cache = KVCache(k, v, 1)
        self.attention = CudaAttention(self.shape, self.cache, max_tokens=MAX_SMALL, pdl=True)
        self.norms = tuple(Norm((torch.rand(DIM, device="cuda") + 0.5).bfloat16(), 1e-6) for _ in range(2))
        self.cos_sin = torch.randn(17_000, DIM, device="cuda")

    def step(self, rows: int, prefix: int, own: int, groups: int, common: float) -> tuple[CudaForwardBatch, HostInputs]:
        length, size = prefix + own, rows // groups
        ends = torch.randperm(SLOTS, device="cuda").int()
        table = torch.zeros(rows, length + 1, dtype=torch.int32, device="cuda")
        table[:, :prefix] = ends[: groups * prefix].view(groups, prefix).repeat_interleave(size, 0)
        table[:, : int(common * prefix)] = ends[: int(common * prefix)]
        rest = ends[groups * prefix : groups * prefix + rows * (own + 1)]
        table[:, prefix:] = rest.view(rows, -1)
        shared = tuple((prefix, tuple(range(first, first + size))) for first in range(0, rows, size))
        batch = make_batch([Part(r, length, [7]) for r in range(rows)], shared=shared)
        tokens = padded(rows, coarse=False)
        positions = np.full(rows, length, np.int32)
        inputs = HostInputs(batch.rows, positions, table[:, length].cpu().numpy(), np.arange(rows, dtype=np.int32))

        def on_device(values: Any, fill: int) -> torch.Tensor:
            whole = np.full(tokens, fill, np.int32)
            whole[:rows] = values
            return torch.from_numpy(whole).cuda()

        place, on_rows = on_device(inputs.positions, -1), on_device(batch.rows, 0)
        forward = CudaForwardBatch(
            batch=batch,
            token_ids=place,
            positions=place,
            slots=on_device(inputs.slots, -1),
            page_table=table,
            rows=on_rows,
            token_rows=on_rows,
            starts=place,
            num_new=place,
            logits_index=place,
            host_page_table=batch.rows,
            key=GraphKey(tokens, 0, True, choose_splits(tokens, KV_HEADS, length)),
        )
        return forward, inputs

    def planned(self, forward: CudaForwardBatch, inputs: HostInputs, costs: tree_plan.Costs) -> bool:
        """Give the batch the key of tree attention, if `costs` say so."""
        tree = self.attention.tree
        plan = tree_plan.plan_tree(
            tree_module.token_groups(forward.batch), inputs.token_rows, tree._tree_shape, costs=costs
        )
        assert forward.key is not None
        if plan is None:
            return False
        tree._send(plan)
        own = int((inputs.positions - plan.prefixes).max())
        splits = choose_splits(forward.key.tokens, KV_HEADS, own)
        forward.key = dataclasses.replace(forward.key, splits=splits, tree=plan.key)
        return True

    def run(self, forward: CudaForwardBatch, qkv: torch.Tensor) -> list[torch.Tensor]:
        return [self.attention.attend(AttentionLayer(i, self.norms, self.cos_sin), qkv, forward) for i in range(LAYERS)]

    def microseconds(self, forward: CudaForwardBatch) -> tuple[float, list[torch.Tensor]]:
        """Of one layer; and what it computes."""
        torch.manual_seed(0)
        qkv = torch.randn(forward.key.tokens, (self.shape.num_heads + 2 * KV_HEADS) * DIM, device="cuda").bfloat16()  # type: ignore[union-attr]
        self.run(forward, qkv)
        outputs: list[torch.Tensor] = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.run(forward, qkv)
        return 1e3 * median_ms(graph.replay) / LAYERS, outputs


def median_ms(run: Callable[[], None], *, repeat: int = 5) -> float:
    run()
    times = []
    for _ in range(repeat):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def compare(bench: Bench, rows: int, prefix: int, own: int, groups: int, common: float) -> dict[str, Any]:
    forward, inputs = bench.step(rows, prefix, own, groups, common)
    plain, want = bench.microseconds(forward)
    chosen = bench.planned(forward, inputs, tree_plan.MEASURED)
    bench.planned(forward, inputs, ALWAYS)
    tree, got = bench.microseconds(forward)
    error = max(
        ((g[:rows].float() - w[:rows].float()).norm() / w[:rows].float().norm()).item()
        for g, w in zip(got, want, strict=True)
    )
    assert forward.key is not None and forward.key.tree is not None
    return {
        "rows": rows,
        "prefix": prefix,
        "plain_us": round(plain, 1),
        "tree_us": round(tree, 1),
        "gain": round(plain / tree, 2),
        "chosen": chosen,
        "kept": round(plain / tree, 2) if chosen else 1.0,
        "error": round(error, 5),
        "key": dataclasses.astuple(forward.key.tree),
    }


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", default="8b,0.6b")
    ap.add_argument("--rows", default="4,8,16,32,64,128,256")
    ap.add_argument("--prefixes", default="512,1024,2048,4096,8192,16384")
    ap.add_argument("--own", type=int, default=64)
    ap.add_argument("--groups", type=int, default=1)
    ap.add_argument("--common", type=float, default=0.0)
    ap.add_argument("--out")
    args = ap.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "own": args.own,
        "groups": args.groups,
    }
    with torch.inference_mode():
        for model in args.models.split(","):
            bench = Bench(model)
            found[model] = []
            print(f"{model}: us a layer, {args.own} own tokens\n rows  prefix    plain     tree   gain chosen   error")
            for rows in map(int, args.rows.split(",")):
                for prefix in map(int, args.prefixes.split(",")):
                    if rows < 2 * args.groups or args.groups * prefix + rows * (args.own + 1) > SLOTS:
                        continue
                    one = compare(bench, rows, prefix, args.own, args.groups, args.common)
                    found[model].append(one)
                    print(
                        f"{rows:5} {prefix:7} {one['plain_us']:8.1f} {one['tree_us']:8.1f} {one['gain']:6.2f} "
                        f"{'tree' if one['chosen'] else 'plain':>6} {one['error']:7.4f}  {one['key']}",
                        flush=True,
                    )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(found, file, indent=1)
    print(json.dumps({key: value for key, value in found.items() if key not in QUERY_HEADS}))


if __name__ == "__main__":
    main()
