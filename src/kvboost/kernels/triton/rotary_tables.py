# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""cos and sin of rotary positions in one launch, the same bits as the modules of Transformers compute in nine.

`tl.cos` and `tl.sin` are libdevice's accurate functions on NVIDIA GPUs, as `cos` in the CUDA C++ of PyTorch is, and not the
fast approximations: the first frequency is 1, so angles go up to the length of the context, where an approximation has
no correct digit left and libdevice reduces the angle in whole (Payne and Hanek's way beyond 105,615). Triton takes their
variant that flushes subnormal numbers, which no step of them reaches from the angles of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before

ANGLES_PER_PROGRAM = 256
"""Few: an angle beyond 105,615 takes hundreds of instructions, and a step of decoding has no more than 64 of one token."""


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(cos, sin)` `[T, R]` in dtype of `positions [T] * inv_freq [R/2]`, each twice side by side, times scaling.

    Product, functions and scaling in float32, rounded to the dtype at the end. positions of any integer type. Raises
    ValueError where a tensor is not of one dimension with its numbers adjacent.
    """
    if any(x.dim() != 1 or (x.shape[0] > 1 and x.stride(0) != 1) for x in (positions, inv_freq)):
        raise ValueError(
            f"positions {tuple(positions.shape)} and inv_freq {tuple(inv_freq.shape)} must be contiguous, of one dimension."
        )
    tokens, half = len(positions), len(inv_freq)
    cos, sin = (torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if tokens:
        block = triton.next_power_of_2(half)
        together = max(1, ANGLES_PER_PROGRAM // block)
        _tables_kernel[(triton.cdiv(tokens, together),)](
            positions, inv_freq, cos, sin, tokens, scaling, HALF=half, BLOCK=block, TOKENS=together,
            num_warps=max(1, min(block * together // 32, 4)), enable_fp_fusion=False, **early(positions.device),
        )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize=["tokens", "scaling"])
def _tables_kernel(
    positions, inv_freq, cos, sin, tokens, scaling,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(groups of TOKENS tokens,)`."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    mask = (token < tokens)[:, None] & (column < HALF)[None, :]
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + column, mask=column < HALF, other=0.0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    at = token[:, None] * (2 * HALF) + column[None, :]
    c = (tl.cos(angle) * scaling).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    tl.store(cos + at, c, mask=mask)
    tl.store(cos + at + HALF, c, mask=mask)
    tl.store(sin + at, s, mask=mask)
    tl.store(sin + at + HALF, s, mask=mask)
