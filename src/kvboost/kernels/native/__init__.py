"""CPU kernels in C++, compiled for this machine at first use. Without a compiler everything runs in PyTorch, slower."""
