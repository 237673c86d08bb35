"""CUDA C++ kernels for what Triton does not reach, compiled for the GPU at hand by the NVRTC that comes with PyTorch.

`support` tells whether they can be used; without them the Triton kernels do the same, slower. The same sources run on a CPU
in the unit tests (tests/cuda_host).
"""
