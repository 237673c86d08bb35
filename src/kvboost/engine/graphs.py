"""CUDA graphs of the model's forward, by the shape of the step: one launch instead of hundreds.

A shape runs plainly when it is first seen, is captured when it comes again, and is replayed from then on. All graphs
share one memory pool; they are replayed one at a time, so their workspaces may lie over one another.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

log = logging.getLogger("kvboost")

MAX_GRAPHS = 128
"""Shapes kept; each costs some MiB of launch descriptions and, the first time, a few tenths of a second."""

DECODE_SIZES = (1, 2, 4, 8, *range(16, 513, 16))
PROMPT_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PROMPT_SEQS = (4, 16, 64, 256, 512)


@dataclass(frozen=True, slots=True)
class Padding:
    """To how many tokens and sequences a step is padded; None: it runs as it is, without a graph."""

    tokens: int
    seqs: int


def padding_for(tokens: int, seqs: int) -> Padding | None:
    """The smallest shape that is captured and holds `tokens` of `seqs` sequences."""
    if tokens == seqs:
        size = _at_least(DECODE_SIZES, tokens)
        return None if size is None else Padding(size, size)
    size = _at_least(PROMPT_TOKENS, tokens)
    if size is None:
        return None
    count = _at_least(PROMPT_SEQS, seqs + (size > tokens))  # padded tokens belong to a padded sequence
    return None if count is None else Padding(max(size, count), count)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int | None:
    place = bisect.bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None


Output = TypeVar("Output")


class Graphs(Generic[Output]):
    """Captured forwards by key. `run` answers the output of `forward`: static tensors that the next run overwrites."""

    def __init__(self, device: torch.device, begin: Callable[[], None] | None = None) -> None:
        """begin: called before each capture and each replay."""
        self._device = device
        self._begin = begin or (lambda: None)
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._given_up = False

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, forward: Callable[[], Output]) -> Output:
        known = self._graphs.get(key)
        if known is None and key in self._seen and not self._given_up:
            known = self._capture(key, forward)
        if known is None:
            self._seen.add(key)
            return forward()
        graph, output = known
        self._begin()
        graph.replay()
        return output

    def capture(self, key: Hashable, forward: Callable[[], Output]) -> None:
        """Have a graph for `key` before it is needed."""
        if key not in self._graphs and not self._given_up:
            forward()  # kernels are compiled and workspaces taken outside of the capture
            self._capture(key, forward)

    def _capture(self, key: Hashable, forward: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output] | None:
        if len(self._graphs) >= MAX_GRAPHS:
            return None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        self._begin()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                output = forward()
        except torch.cuda.OutOfMemoryError:
            self._give_up("no GPU memory is left for them. Lower gpu_memory_utilization or num_blocks")
            return None
        except RuntimeError as error:  # code that waits for the device, as some mixture-of-experts layers do
            self._give_up(f"the model's code cannot be captured ({str(error).splitlines()[0]})")
            return None
        self._graphs[key] = graph, output
        return self._graphs[key]

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        log.warning("CUDA graphs are off for steps of new shapes: %s.", reason)
