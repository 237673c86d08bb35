"""Device memory in which blocks of one launch add up what each has summed alone.

A workspace serves launches that follow one another, so there is one for each stream, and one for all launches that are captured:
they must lie in one branch of a graph, and graphs that hold some must not be replayed at the same time, as those that share a
memory pool must not either. It is never freed or moved, because a captured graph knows its address.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvboost.kernels.cuda.compiler import CudaUnavailable

MOST_PARTIALS = 1 << 19
"""Numbers in a workspace: 2 MiB."""

MOST_COUNTERS = MOST_PARTIALS // 16
"""Enough for every product whose partial sums fit: it has 2 parts at least, and a counter for 8 or more of a part's outputs."""


class Workspace(NamedTuple):
    """partials: fp32, of any content. counters: int32, zero between launches."""

    partials: Tensor
    counters: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str) -> Workspace:
        return cls(
            torch.zeros(MOST_PARTIALS, dtype=torch.float32, device=device),
            torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device),
        )


def holds(parts: int, rows: int, n: int) -> bool:
    """Whether partial sums `[parts, rows, n]` have room, and counters of their tiles."""
    return parts * rows * n <= MOST_PARTIALS


CAPTURED = -1
"""In the place of a stream: launches that are captured."""

_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def prepare(device: torch.device) -> None:
    """Have the workspace of captured launches before the first capture, in which memory would belong to the graph.

    Raises `CudaUnavailable` when a capture has begun already.
    """
    if (device, CAPTURED) not in _workspaces:
        with torch.cuda.device(device):
            _made(device, CAPTURED)


def workspace_of(device: torch.device) -> Workspace:
    """That of the current stream of `device`, which is the current device. Raises `CudaUnavailable` as `prepare` does."""
    prepare(device)
    stream = CAPTURED if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream
    return _workspaces.get((device, stream)) or _made(device, stream)


def _made(device: torch.device, stream: int) -> Workspace:
    if torch.cuda.is_current_stream_capturing():
        raise CudaUnavailable("a workspace cannot be made while a graph is captured; run the product once before")
    made = Workspace.zeros(device)
    torch.cuda.current_stream(device).synchronize()  # zeros now, for whatever stream a graph is replayed on
    return _workspaces.setdefault((device, stream), made)  # another thread may have been faster
