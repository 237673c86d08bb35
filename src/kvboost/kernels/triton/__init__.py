"""Triton kernels for CUDA GPUs. `support` tells whether they can be used; every other module imports Triton.

The same source runs on a CPU under `TRITON_INTERPRET=1`, which must be set before Triton is first imported: that is how
the unit tests check it. Nothing here reads a device value on the host, so every launch can be captured in a CUDA graph.
"""
