"""What packed_few.cu computes around its product: by its source on a CPU (tests/cuda_host), against the kernels that do it
alone. On a GPU: tests/gpu/test_packed_few_gpu.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_rig import Case, built, plan_of
from kvboost.kernels.cuda.packed_few import Around, FewTile
from kvboost.weights.packing import Packing, Scheme
from packed_rig import packing_id, random_rows
from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.elementwise import act_mul

pytestmark = [interpreted, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]

SMALL, LARGE = torch.bfloat16, torch.float16


def nearly_equal(out: Tensor, want: Tensor) -> None:
    """Up to one unit in the last place of a few numbers: both take the same steps but for the last bit of an exponential, of a
    root, or of a sum in fp32."""
    assert out.shape == want.shape and out.dtype == want.dtype and out.isfinite().all()
    info = torch.finfo(out.dtype)
    apart = (out.double() - want.double()).abs()
    assert (apart <= want.double().abs() * info.eps + info.smallest_normal * info.eps).all()
    assert (apart > 0).double().mean() <= 0.02


GATED = [
    # dtype, packing, tile, rows of x, outputs, blocks, activation
    (SMALL, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(1, 1, 8, 3, 3, 1), 1, 40, 2, "silu"),
    (LARGE, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(2, 1, 4, 2, 2, 4), 3, 37, 1, "gelu_tanh"),
    (LARGE, Packing(Scheme.ZEROS, 4, 640, 640), FewTile(2, 1, 4, 2, 2, 0), 7, 43, 2, "silu"),
    (SMALL, Packing(Scheme.ZEROS, 4, 384, 64), FewTile(2, 2, 4, 2, 2, 0), 19, 27, 1, "gelu"),
    (SMALL, Packing(Scheme.SYMMETRIC, 4, 384, 32), FewTile(1, 1, 4, 2, 2, 2), 2, 8, 1, "silu"),
    (LARGE, Packing(Scheme.MINIMUM, 4, 640, 128), FewTile(1, 1, 4, 3, 2, 1), 1, 29, 2, "gelu"),
    (SMALL, Packing(Scheme.TWO_LEVEL, 4, 768, 32), FewTile(1, 1, 4, 3, 2, 4), 4, 21, 2, "gelu_tanh"),
]


@pytest.mark.parametrize(
    ("dtype", "packing", "tile", "rows", "width", "blocks", "activation"),
    GATED,
    ids=[f"{packing_id(p)}-{t.tiles}x{t.cols}x{t.warps}-{r}rows-{a}" for _, p, t, r, _, _, a in GATED],
)
def test_gates(
    dtype: torch.dtype, packing: Packing, tile: FewTile, rows: int, width: int, blocks: int, activation: str, tmp_path: Path
) -> None:  # fmt: skip
    """The same sums as the product alone, gated as `act_mul` does."""
    torch.manual_seed(0)
    x = torch.randn(rows, packing.k).to(dtype)
    case = Case(x, random_rows(packing, 2 * width), packing)
    biased = Case(x, case.weight, packing, torch.randn(2 * width).to(dtype) * 3)
    alone = built(case, plan_of(tile, packing, 2 * width, blocks), tmp_path)
    plan = plan_of(tile, packing, 2 * width, blocks, Around(activation))
    folder = tmp_path / "gated"
    folder.mkdir()
    gated = built(case, plan, folder)
    for one in (case, biased):
        nearly_equal(gated(one), act_mul(alone(one), activation))
