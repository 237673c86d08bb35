"""Whether the Triton kernels can serve a model on a device. Imports without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch

from kvboost.cache.layout import LayerShape

MAX_HEAD_DIM = 256
"""Two tiles of wider keys and values do not fit in the shared memory of a multiprocessor."""

MIN_CAPABILITY = {torch.float16: (7, 5), torch.float32: (7, 5), torch.bfloat16: (8, 0)}
"""The oldest GPUs with matrix instructions for a dtype; float32 is computed without them."""


def unsupported(layers: Sequence[LayerShape], q_heads: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why attention of these layers cannot run in Triton there; None when it can."""
    if device.type != "cuda":
        return f"Triton kernels need a CUDA GPU, the model is on {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if dtype not in MIN_CAPABILITY:
        return f"no Triton kernel for KV in {dtype}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY[dtype]:
        needed = ".".join(map(str, MIN_CAPABILITY[dtype]))
        return f"{dtype} needs compute capability {needed}, this GPU has {'.'.join(map(str, capability))}"
    for index, layer in enumerate(layers):
        problem = _shape_problem(layer, q_heads)
        if problem is not None:
            return f"layer {index} has {problem}"
    return None


@lru_cache
def serves_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products with packed weights, and their unpacking, run in Triton on this device in this dtype."""
    if device.type != "cuda" or dtype not in MIN_CAPABILITY or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY[dtype]


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel on this device may start before the one before it has ended, and wait inside (`early`)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _shape_problem(layer: LayerShape, q_heads: int) -> str | None:
    if layer.k_heads != layer.v_heads:
        return f"{layer.k_heads} key heads and {layer.v_heads} value heads"
    if q_heads % layer.k_heads:
        return f"{q_heads} query heads, not a multiple of its {layer.k_heads} KV heads"
    if max(layer.k_dim, layer.v_dim) > MAX_HEAD_DIM:
        return f"heads of {max(layer.k_dim, layer.v_dim)}, wider than {MAX_HEAD_DIM}"
    return None
