"""Triton kernels. Every kernel of a decode step follows one protocol of programmatic dependent launch (PDL).

A kernel lets its successor start at once, so any number of them may be resident, each waiting for the one before it.
Before `gdc_wait()` a kernel touches nothing but constants (weights) and what was there when the step's first kernel
with PDL began: inputs that `prepare_kernel` wrote, which like the embedding has no PDL, and KV of earlier steps. It
calls `gdc_wait()` on every path, so a kernel's completion implies that of all before it, which is what makes reuse of
activation buffers safe. `PDL=False` compiles the same kernel without the two instructions (the Triton interpreter
knows neither). Measured: letting the successor start only after the own wait costs 4 to 30 % at one row.
"""
