"""Compute kernels by machine: C++ for CPUs, Triton for GPUs. They know tensors and pointers, not models."""
