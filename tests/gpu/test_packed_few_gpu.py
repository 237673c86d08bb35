"""The CUDA product of few rows with 4-bit weights on a GPU: every layout, real shapes, and in a row of kernels that start
early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from packed_rig import packing_id, random_rows
from triton_rig import close

pytest.importorskip("triton")

from kvboost.kernels.cuda.packed_few import packed_few, serves
from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm
from kvboost.kernels.triton.packed import packed_product
from kvboost.weights.packing import Packing, Scheme

pytestmark = pytest.mark.gpu

PACKINGS = [
    Packing(Scheme.ZEROS, 4, 5120, 128), Packing(Scheme.ZEROS, 4, 1280, 640), Packing(Scheme.ZEROS, 4, 640, 64),
    Packing(Scheme.ZEROS, 4, 384, 32), Packing(Scheme.SYMMETRIC, 4, 3584, 32), Packing(Scheme.SYMMETRIC, 4, 128, 128),
    Packing(Scheme.MINIMUM, 4, 1536, 32), Packing(Scheme.TWO_LEVEL, 4, 3584, 32),
]  # fmt: skip
ROWS = [1, 2, 3, 4, 5, 8, 9, 16]
DTYPES = [torch.bfloat16, torch.float16]


def product(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    return linear(x.double(), packing.dense(weight).double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_product(packing: Packing, dtype: torch.dtype) -> None:
    for n in (32, 307, 5120):
        weight, bias = random_rows(packing, n, device="cuda"), torch.randn(n, device="cuda").to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, packing.k, device="cuda").to(dtype)
            assert serves(x, weight, packing, bias)
            want = product(x, weight, packing, bias)
            out = packed_product(x, weight, packing, bias)
            close(out, want, (n, rows))
            assert torch.equal(out, packed_product(x, weight, packing, bias)), "the order of sums is fixed"
            total = torch.randn(rows, n, device="cuda").to(dtype)
            want = want + total
            close(packed_few(x, weight, packing, bias, total=total), want, (n, rows, "total"))
            close(total, want, (n, rows, "in place"))


@pytest.mark.parametrize("n, k", [(55_296, 5120), (5120, 27_648), (7168, 5120)])
def test_real_shapes(n: int, k: int) -> None:
    packing = Packing(Scheme.ZEROS, 4, k, 128)
    weight = random_rows(packing, n, device="cuda")
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").half()
        close(packed_product(x, weight, packing), product(x, weight, packing))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_kernels_that_start_early_wait_for_their_inputs(rows: int) -> None:
    """Layers in a graph, where each kernel starts while the one before runs, against the same with a wait after each."""
    down, up = Packing(Scheme.ZEROS, 4, 3584, 128), Packing(Scheme.ZEROS, 4, 1024, 128)
    first, second = random_rows(up, 7168, 1, "cuda"), random_rows(down, 1024, 2, "cuda")
    norm = torch.ones(1024, device="cuda", dtype=torch.float16)
    start = torch.randn(rows, 1024, device="cuda").half()

    def run(pause: bool) -> Tensor:
        total, delta = start.clone(), torch.zeros_like(start)
        for _ in range(40):
            normed, total = add_rms_norm(delta, total, norm, 1e-6)
            hidden = packed_product(normed, first, up)
            if pause:
                torch.cuda.synchronize()
            hidden = act_mul(hidden, "silu")
            if pause:
                torch.cuda.synchronize()
            delta = packed_product(hidden, second, down)
            if pause:
                torch.cuda.synchronize()
        return total

    want = run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(False)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, want)
    assert torch.equal(run(False), want)
