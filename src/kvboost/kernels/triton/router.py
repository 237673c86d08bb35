# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""A router's choice in one launch: softmax over the experts in float32, the largest few, and their sum made 1.

Among equal probabilities, which 16-bit logits often give, the lower index is chosen, as torch.topk does on a GPU; NaNs
are larger than all numbers, so that what overflowed still chooses experts that exist.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before

MAX_EXPERTS = 4096
"""A warp holds the probabilities of a token."""


def route(logits: Tensor, top: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights in dtype and experts in int64, both `[T, top]`, best first, of `logits [T, E]`.

    renormalise: the weights of a token add up to 1. Raises ValueError for more choices than experts, more experts than
    MAX_EXPERTS, or logits of a row that are not adjacent.
    """
    tokens, experts = logits.shape
    if not 1 <= top <= experts <= MAX_EXPERTS or logits.stride(1) != 1:
        raise ValueError(
            f"top={top} of logits {tuple(logits.shape)} with strides {logits.stride()} must be 1 to E of at most "
            f"{MAX_EXPERTS} adjacent numbers."
        )
    weights, index = logits.new_empty(tokens, top, dtype=dtype), logits.new_empty(tokens, top, dtype=torch.int64)
    if tokens:
        _route_kernel[(tokens,)](
            logits, weights, index, logits.stride(0), EXPERTS=experts, BLOCK=triton.next_power_of_2(experts), TOP=top,
            BLOCK_TOP=triton.next_power_of_2(top), RENORMALISE=renormalise, num_warps=1 if experts <= 512 else 4,
            **early(logits.device),
        )  # fmt: skip
    return weights, index


@triton.jit
def _route_kernel(
    logits, weights, index, stride,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, BLOCK_TOP: tl.constexpr, RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens,)`. A key is a probability's bits, which grow with it, above the distance to the last index."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    x = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    probability = x / tl.sum(x, 0)
    bits = probability.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN may have a sign
    key = (bits.to(tl.int64) << 32) | (BLOCK - 1 - expert).to(tl.int64)
    key = tl.where(real, key, -1)
    choice = tl.arange(0, BLOCK_TOP)
    best = tl.zeros([BLOCK_TOP], tl.int64)
    for i in tl.static_range(TOP):
        largest = tl.max(key, 0)
        best = tl.where(choice == i, largest, best)
        key = tl.where(key == largest, -1, key)
    chosen = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if RENORMALISE:
        chosen = chosen / tl.sum(tl.where(choice < TOP, chosen, 0.0), 0)
    at = token * TOP + choice
    tl.store(weights + at, chosen.to(weights.dtype.element_ty), mask=choice < TOP)
    tl.store(index + at, BLOCK - 1 - (best & 0xFFFFFFFF), mask=choice < TOP)
