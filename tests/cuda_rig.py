"""Shared by the tests of packed_few.cu: its source as a library for this CPU, and GPUs to plan launches for."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvboost.kernels.cuda import compiler, packed_few
from kvboost.kernels.cuda.driver import address_of
from kvboost.kernels.cuda.packed_few import PRODUCT, Around, FewTile, Gpu, Launch, definitions
from kvboost.kernels.cuda.workspace import Workspace
from kvboost.kernels.norm import RmsNorm
from kvboost.weights.packing import Packing

HOST = Path(__file__).parent / "cuda_host"
H200 = Gpu(132, 228 << 10, 227 << 10)
RTX = Gpu(24, 100 << 10, 99 << 10)


def plan_of(tile: FewTile, packing: Packing, n: int, blocks_of_a_part: int, around: Around = PRODUCT) -> Launch:
    """A launch of so many blocks for each part of k."""
    buffers = 1 if -(-n // (16 * tile.tiles)) <= blocks_of_a_part else 2
    return Launch(
        tile,
        blocks_of_a_part * tile.parts,
        buffers,
        tile.shared_bytes(packing, buffers, around),
        around,
    )


def dirty_workspace() -> Workspace:
    """Partial sums of any content, here NaN; counters of zero."""
    space = Workspace.zeros("cpu")
    space.partials.fill_(torch.nan)
    return space


@dataclass
class Case:
    """One product: x `[rows, k]`, perhaps to be normalised, and packed rows, and what is added to it."""

    x: Tensor
    weight: Tensor
    packing: Packing
    bias: Tensor | None = None
    total: Tensor | None = None
    norm: RmsNorm | None = None

    def exact(self) -> Tensor:
        """In float64, from the weights themselves."""
        want = self.x.double() @ self.packing.dense(self.weight).double().T
        return sum((t.double() for t in (self.bias, self.total) if t is not None), want)

    def bound(self) -> Tensor:
        """How far a result that is summed in fp32 and rounded once may lie from `exact`."""
        parts = self.x.double().abs() @ self.packing.dense(self.weight).double().abs().T
        return self.exact().abs() * torch.finfo(self.x.dtype).eps + parts * 2.0**-16


class HostKernel:
    """Stands for a `Kernel` of a source in kvboost/kernels/cuda, compiled for this CPU.

    At most `together` blocks run at a time; `seed` says which begin first and whose turn it is.
    """

    def __init__(self, name: str, definitions: Mapping[str, int], folder: Path) -> None:
        library = folder / f"{name}.so"
        flags = [f"-D{key}={int(value)}" for key, value in definitions.items()]
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *flags, f"-I{HOST}", f"-I{compiler.HERE}",
             str(HOST / f"{name}.cpp"), "-o", str(library)],
            check=True, timeout=120,
        )  # fmt: skip
        self._run = ctypes.CDLL(str(library)).run
        self.together, self.seed = 2, 0

    def launch(self, grid: Sequence[int], shared_bytes: int, arguments: Sequence[Any]) -> None:
        given = (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        self._run(*grid, ctypes.c_size_t(shared_bytes), self.together, self.seed, *given)


def built(case: Case, plan: Launch, folder: Path) -> Callable[..., Tensor]:
    """The kernel for a launch. Called with (case, space, together, seed) it answers the product, see `HostKernel`; in_place:
    in memory that began as the total."""
    made = definitions(case.x.dtype, case.packing.scheme, case.packing.group, plan.tile, plan.around)
    kernel = HostKernel("packed_few", made, folder)

    def product(
        case: Case, space: Workspace | None = None, together: int = 2, seed: int = 0, in_place: bool = False
    ) -> Tensor:
        rows, width = case.x.shape[0], plan.around.width(case.weight.shape[0])
        out = torch.full((rows, width), torch.nan, dtype=case.x.dtype)
        if in_place:
            out.copy_(case.total)
        total, norm = out if in_place else case.total, None if case.norm is None else case.norm.weight
        pointers = map(address_of, (case.x, case.weight, case.bias, total, norm, out))
        shape = packed_few.shape_of(case.x, case.weight, case.packing, plan, case.norm)
        space = space or dirty_workspace()
        kernel.together, kernel.seed = together, seed
        kernel.launch(
            (plan.blocks, -(-rows // (8 * plan.tile.cols))),
            plan.shared_bytes,
            (*pointers, shape, *map(address_of, space)),
        )
        return out

    return product


def nearly_equal(
    out: Tensor, want: Tensor, often: float = 0.02, beside: float = 0.0, units: float = 1.0, terms: Tensor | None = None
) -> None:
    """Up to `units` in the last place, and `beside` times such a unit of the root mean square; and the same bits but for a share
    of `often`, or two numbers: both take the same steps but for the last bit of an exponential, of a root, or of a sum in fp32.
    terms: sizes of what the exact result was left of, of which a millionth may differ."""
    assert out.shape == want.shape and out.dtype == want.dtype and out.isfinite().all()
    info = torch.finfo(out.dtype)
    wide = want.double()
    apart = (out.double() - wide).abs()
    allowed = (units * wide.abs() + beside * wide.square().mean().sqrt() + info.smallest_normal) * info.eps
    if terms is not None:
        allowed = allowed + 1e-6 * terms.double().abs()
    assert (apart <= allowed).all(), float((apart / allowed).max())
    assert (apart > 0).sum() <= max(2, often * out.numel()), float((apart > 0).double().mean())
