"""Triton kernels. Every kernel of a decode step follows one protocol of programmatic dependent launch (PDL).

A kernel may start while the one before it still runs. Before `gdc_wait()` it touches nothing but constants (weights)
and what was written at least two kernels earlier: as every kernel lets its successor start only after its own wait,
the kernel before last has completed by then. It calls `gdc_wait()` on every path, so a kernel's completion implies
that of all before it, which is what makes reuse of activation buffers safe. `PDL=False` compiles the same kernel
without the two instructions (the Triton interpreter knows neither).
"""
