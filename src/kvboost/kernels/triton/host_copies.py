# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Small copies between pinned host memory and the device, by kernels that reach over the bus themselves.

A copy engine takes 5 us to begin after a kernel, and the next kernel 5 us to begin after it: between two steps of decoding
that was 25 us in which the GPU did nothing. For megabytes it makes no difference, the bus is the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before

WORDS = 512
"""Of 8 bytes, copied by one program."""


def fetch(host: Tensor, device: Tensor, num_ids: int = 0, chosen: Tensor | None = None) -> None:
    """Copy `host`, uint8 in pinned memory, to `device`, as many bytes on a GPU, a multiple of 8; both start at a multiple of 8.

    The first `num_ids` int64 are token ids: of those -1 - r stands for the token `chosen[r]` (int32), which is on the device.
    The host may write to `host` again once the stream has come this far. Raises ValueError where sizes differ.
    """
    if host.shape != device.shape or host.numel() % 8:
        raise ValueError(f"{host.numel()} bytes to {device.numel()}: they must be as many, and a multiple of 8.")
    source, target = host.view(torch.int64), device.view(torch.int64)
    _fetch_kernel[(triton.cdiv(len(source), WORDS),)](
        source, target, chosen, len(source), num_ids, BLOCK=WORDS, num_warps=4, **early(device.device)
    )


def publish(source: Tensor, host: Tensor) -> None:
    """Copy a contiguous int32 tensor on a GPU to one like it in pinned memory. It is there once an event that is recorded
    after this call has passed. Raises ValueError where shapes or dtypes differ."""
    if source.shape != host.shape or source.dtype != torch.int32 or host.dtype != torch.int32:
        raise ValueError(
            f"{tuple(source.shape)} in {source.dtype} to {tuple(host.shape)} in {host.dtype}: int32 of one shape."
        )
    _publish_kernel[(triton.cdiv(source.numel(), WORDS),)](
        source, host, source.numel(), BLOCK=WORDS, num_warps=4, **early(source.device)
    )


@triton.jit(do_not_specialize=["words", "num_ids"])
def _fetch_kernel(host, device, chosen, words, num_ids, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid `(blocks of words,)`. What the host wrote was there before the launch, and is read while the kernel before runs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    value = tl.load(host + at, mask=inside, other=0, cache_modifier=".cv")  # the host changes it between kernels
    wait_for_kernel_before(EARLY)
    if chosen is not None:
        open_ = inside & (at < num_ids) & (value < 0)
        value = tl.where(open_, tl.load(chosen + (-1 - value), mask=open_, other=0).to(tl.int64), value)
    tl.store(device + at, value, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _publish_kernel(source, host, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid `(blocks,)`."""
    wait_for_kernel_before(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + at, tl.load(source + at, mask=at < count), mask=at < count)
