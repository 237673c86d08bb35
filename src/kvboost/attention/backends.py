"""Which attention serves a model on a device, and why. Decided once, when an engine is built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvboost.attention import paged_native
from kvboost.attention.paged_torch import PagedStep, Span
from kvboost.attention.step import StepAttention
from kvboost.cache.layout import LayerShape
from kvboost.cache.pool import KVPool
from kvboost.kernels.native.library import unavailable


class CountingStep(StepAttention, Protocol):
    """A step that counts the layers it served."""

    num_attended: int


StepFactory = Callable[[KVPool, Sequence[Span], dict[int, int]], CountingStep]


@dataclass(frozen=True)
class Backend:
    """name: `triton` (GPU), `native` (C++, CPU) or `torch`. make_step: builds the attention of one step; for `triton`
    None, as its steps live on static tensors of the runner."""

    name: str
    reason: str
    make_step: StepFactory | None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(
    layers: Sequence[LayerShape], q_heads: int, dtype: torch.dtype, device: torch.device, compiled: bool
) -> Backend:
    """The fastest backend that can serve such layers. `compiled` False: plain PyTorch."""
    if not compiled:
        problem: str | None = "compile=False was asked for"
    elif device.type == "cuda":
        problem = _triton_problem(layers, q_heads, dtype, device)
        if problem is None:
            return Backend("triton", "Triton kernels over pages, steps of known shapes as CUDA graphs", None)
    else:
        problem = paged_native.unsupported(layers, dtype, device) or unavailable()
        if problem is None:
            reason = "C++ kernels compiled for this processor, reading pages in place"
            return Backend("native", reason, paged_native.NativeStep)
    return Backend("torch", f"gathers pages, then scaled_dot_product_attention ({problem})", PagedStep)


def _triton_problem(layers: Sequence[LayerShape], q_heads: int, dtype: torch.dtype, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    from kvboost.kernels.triton.support import unsupported

    return unsupported(layers, q_heads, dtype, device)
