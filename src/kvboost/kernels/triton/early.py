# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Kernels of one stream closer together: each starts while the one before ends, and waits inside for what that stores.

"Programmatic dependent launch", from compute capability 9.0 on. It hides the start of a kernel, a microsecond of which a
step of decoding has hundreds, and lets products read weights ahead that need not wait (kernels/cuda).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.kernels.triton.support import starts_early


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel begins with `wait_for_kernel_before(EARLY)`."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


@triton.jit
def wait_for_kernel_before(EARLY: tl.constexpr):
    """Before anything is written, or read that a kernel of this step writes; by every program, those that do nothing else, too.
    The next kernel may start meanwhile: it waits in the same way for this one."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(address, wanted):
    """Bring the line of memory behind each `address` into the L2 cache where `wanted`. Nothing waits for it, and a kernel that
    writes it meanwhile does so in the same cache: it may be called before `wait_for_kernel_before`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [address.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
