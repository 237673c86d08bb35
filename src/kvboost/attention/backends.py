"""Which attention serves a model on a device, and why. Decided once, when an engine is built."""

from __future__ import annotations

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
    """name: `native` (C++, CPU) or `torch`. make_step: builds the attention of one step."""

    name: str
    reason: str
    make_step: StepFactory


def choose(layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, compiled: bool) -> Backend:
    """The fastest backend that can serve such layers. `compiled` False: plain PyTorch."""
    if not compiled:
        problem: str | None = "compile=False was asked for"
    else:
        problem = paged_native.unsupported(layers, dtype, device) or unavailable()
    if problem is None:
        return Backend(
            "native", "C++ kernels compiled for this processor, reading pages in place", paged_native.NativeStep
        )
    return Backend("torch", f"gathers pages, then scaled_dot_product_attention ({problem})", PagedStep)
