"""What one forward pass tells the attention layers: which token goes to which slot, and who sees what.

The runner sets a `StepAttention` for the duration of its model call, in its own thread. Outside of that the model is
an ordinary Transformers model. The step object decides, not a global switch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class StepAttention(Protocol):
    """Serves every attention layer of one forward pass."""

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """query `[1, Hq, T, D]`, key and value `[1, Hkv, T, D]`, rotated. Returns `[1, T, Hq, Dv]`."""
        ...


_local = threading.local()


def current_step() -> StepAttention | None:
    """The step running in this thread, if any."""
    return getattr(_local, "step", None)


@contextmanager
def running(step: StepAttention) -> Iterator[None]:
    """Let `step` serve the attention layers of model calls made in this thread."""
    _local.step = step
    try:
        yield
    finally:
        _local.step = None
