"""Question: what does each part of a long prompt's step cost at the rate that the power limit leaves in the long run?

    python -m tests.bench.prefill_step [--parts linears,gated,attention] [--hidden 4096 --inner 12288 --layers 36]

Every measurement is the work of 65,536 tokens in a row, after one like it: short bursts run 10 % faster than the GPU
can go on. Weights and inputs are normal values (zeros take less power). Prints a table and, last, one JSON object.

    linears     the four products of a layer and silu, steps of 8,192, 16,384 and 32,768 tokens
    gated       gate, up and silu as one kernel and as two
    attention   fa3 through pages of one token and over keys where they were made
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton

from sglite.runtime.device.cuda.kernels.elementwise import silu_kernel
from sglite.runtime.device.cuda.ops import launch_gated

TOKENS = 65536
HEADS, KV_HEADS, DIM = 32, 8, 128
_WEIGHTS = 4  # sets in turn, so that none is in L2


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def milliseconds(work: Callable[[], None]) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def silu(gate_up: torch.Tensor, y: torch.Tensor) -> None:
    silu_kernel[(len(y), triton.cdiv(y.shape[1], 2048))](gate_up, y, y.shape[1], BLOCK=2048)


class Layers:
    def __init__(self, hidden: int, inner: int, layers: int) -> None:
        self.hidden, self.inner, self.layers = hidden, inner, layers
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv, self.out, self.gate_up, self.down = (
            [normal(*shape, scale=0.02) for _ in range(_WEIGHTS)]
            for shape in ((qkv, hidden), (hidden, HEADS * DIM), (2 * inner, hidden), (hidden, inner))
        )

    def linears(self, step: int) -> float:
        x, attended, residual = normal(step, self.hidden), normal(step, HEADS * DIM), normal(step, self.hidden)
        y = torch.empty(step, self.inner, device="cuda", dtype=x.dtype)

        def work() -> None:
            for i in range(TOKENS // step * self.layers):
                w = i % _WEIGHTS
                F.linear(x, self.qkv[w])
                residual.addmm_(attended, self.out[w].t(), beta=0.5)
                silu(F.linear(x, self.gate_up[w]), y)
                residual.addmm_(y, self.down[w].t(), beta=0.5)

        return milliseconds(work)

    def gated(self, step: int, *, fused: bool) -> float:
        x, y = normal(step, self.hidden), normal(step, self.inner)
        programs = torch.cuda.get_device_properties().multi_processor_count

        def work() -> None:
            for i in range(TOKENS // step * self.layers):
                weight = self.gate_up[i % _WEIGHTS]
                if fused:
                    launch_gated(x, weight, y, programs=programs)
                else:
                    silu(F.linear(x, weight), y)

        return milliseconds(work)


def attention(rows: int, layers: int, *, paged: bool) -> float:
    import flashinfer

    length = 4096
    tokens = rows * length
    q, k, v = (normal(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, workspace = torch.empty_like(q), torch.zeros(384 << 20, dtype=torch.uint8, device="cuda")
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    types = {"causal": True, "q_data_type": q.dtype, "kv_data_type": q.dtype}
    if paged:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        pages, last = torch.arange(tokens, dtype=torch.int32, device="cuda"), torch.ones(rows, dtype=torch.int32)
        wrapper.plan(ends, ends, pages, last, HEADS, KV_HEADS, DIM, 1, **types)
        run = lambda: wrapper.run(q, (k[:, None], v[:, None]), out=out)  # noqa: E731
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(ends, ends, HEADS, KV_HEADS, DIM, **types)
        run = lambda: wrapper.run(q, k, v, out=out)  # noqa: E731

    def work() -> None:
        for _ in range(TOKENS // tokens * layers):
            run()

    return milliseconds(work)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--parts", default="linears,gated,attention")
    ap.add_argument("--hidden", type=int, default=4096)
    ap.add_argument("--inner", type=int, default=12288)
    ap.add_argument("--layers", type=int, default=36)
    args = ap.parse_args()
    layers = Layers(args.hidden, args.inner, args.layers)
    cases: dict[str, Callable[[], float]] = {}
    for step in (8192, 16384, 32768):
        cases[f"linears {step}"] = lambda step=step: layers.linears(step)
    for name, fused in (("apart", False), ("fused", True), ("apart again", False), ("fused again", True)):
        cases[f"gated {name}"] = lambda fused=fused: layers.gated(8192, fused=fused)
    for rows in (2, 4):
        for name, paged in (("paged", True), ("in place", False)):
            cases[f"attention {rows}x4096 {name}"] = lambda rows=rows, paged=paged: attention(
                rows, args.layers, paged=paged
            )
    found: dict[str, float] = {}
    for name, case in cases.items():
        if name.split()[0] in args.parts.split(","):
            found[name] = round(case(), 1)
            print(f"{name:28} {found[name]:8.1f} ms", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
