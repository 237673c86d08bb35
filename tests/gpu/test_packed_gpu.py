"""Packed weights in Triton, compiled: every scheme and dtype, real shapes, graphs, and what modules make of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from packed_rig import PACKINGS, packing_id, random_rows, unpacked_exactly
from triton_rig import close

pytest.importorskip("triton")

from kvboost.kernels.triton.packed import FUSED_ROWS, look_up, packed_many_rows, packed_product, unpack
from kvboost.kernels.triton.packed_linear import PackedTile, packed_few_rows
from kvboost.weights.compute import packed_linear, torch_linear
from kvboost.weights.modules import PackedEmbedding, PackedLinear
from kvboost.weights.packing import Packing, Scheme

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [1, 3, 16, 17, 64, 129]
INT4 = Packing(Scheme.ZEROS, 4, 5120, 128)

LARGE = (
    (1024, INT4),
    (5120, Packing(Scheme.ZEROS, 4, 27648, 128)),
    (55_296, INT4),
    (1001, Packing(Scheme.ZEROS, 4, 1536, 64)),
    (4608, Packing(Scheme.TWO_LEVEL, 4, 3584, 32)),
    (1537, Packing(Scheme.TWO_LEVEL, 5, 5120, 32)),
    (3584, Packing(Scheme.TWO_LEVEL_SIGNED, 6, 18_944, 16)),
    (5120, Packing(Scheme.SYMMETRIC, 8, 5120, 32)),
    (5120, Packing(Scheme.SYMMETRIC, 8, 5120, 5120, 4)),
    (1536, Packing(Scheme.MINIMUM, 4, 576, 32)),
    (5121, Packing(Scheme.FLOAT8, 8, 5120, 128, 4)),
)


def product(x: Tensor, rows: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    return linear(x.double(), packing.dense(rows).double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_product(packing: Packing, dtype: torch.dtype) -> None:
    weight, bias = random_rows(packing, 307, device="cuda"), torch.randn(307, device="cuda").to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, packing.k, device="cuda").to(dtype)
        for tile in (None, PackedTile(32, 64, 3, 4, 2)):
            out = packed_few_rows(x, weight, packing, bias, tile=tile)
            close(out, product(x, weight, packing, bias), (rows, tile))
            assert torch.equal(out, packed_few_rows(x, weight, packing, bias, tile=tile)), "the order of sums is fixed"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("n", "packing"), LARGE, ids=lambda value: packing_id(value) if isinstance(value, Packing) else str(value)
)
def test_product_of_large_weights(rows: int, n: int, packing: Packing) -> None:
    weight, x = random_rows(packing, n, device="cuda"), torch.randn(rows, packing.k, device="cuda").bfloat16()
    close(packed_few_rows(x, weight, packing), product(x, weight, packing))


def test_weights_beyond_two_billion_bytes() -> None:
    n = 2**31 // INT4.row_bytes + 100
    weight = torch.zeros(n, INT4.row_bytes, dtype=torch.uint8, device="cuda")
    weight[-300:] = random_rows(INT4, 300, device="cuda")
    x = torch.randn(2, INT4.k, device="cuda").bfloat16()
    close(packed_few_rows(x, weight, INT4)[:, -300:], product(x, weight[-300:], INT4))
    index = torch.tensor([n - 1, n - 300], device="cuda")
    assert torch.equal(look_up(index, weight, INT4, torch.bfloat16), INT4.dense(weight[index], torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_unpacking_and_looking_up(packing: Packing, dtype: torch.dtype) -> None:
    weight = random_rows(packing, 301, device="cuda")
    unpacked_exactly(unpack(weight, packing, torch.empty(301, packing.k, dtype=dtype, device="cuda")), weight, packing)
    index = torch.randint(0, 301, (57,), device="cuda")
    unpacked_exactly(look_up(index, weight, packing, dtype), weight[index], packing)


def test_every_float8_code_with_and_without_a_product() -> None:
    """Subnormal numbers too: bf16 holds them as subnormals before they are scaled."""
    packing = Packing(Scheme.FLOAT8, 8, 256, 256, 4)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 256).view(torch.float8_e4m3fn)
    weight = packing.pack(codes, torch.ones(1, 1, device="cuda"))
    expected = packing.dense(weight)
    expected[0, 0x7F], expected[0, 0xFF] = 480.0, -480.0
    assert torch.equal(unpack(weight, packing, torch.empty(1, 256, device="cuda")), expected)
    for dtype in DTYPES:
        picked = packed_few_rows(torch.eye(256, dtype=dtype, device="cuda"), weight, packing)
        assert torch.equal(picked.T.float(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(dtype: torch.dtype) -> None:
    """In one piece and, beyond 32 MiB of unpacked weights, in several."""
    for n in (1001, 9000):
        weight, b = random_rows(INT4, n, device="cuda"), torch.randn(n, device="cuda").to(dtype)
        x = torch.randn(200, INT4.k, device="cuda").to(dtype)
        dense = INT4.dense(weight, dtype)
        for bias in (None, b):
            reference = linear(x.double(), dense.double(), None if bias is None else bias.double())
            close(packed_many_rows(x, weight, INT4, bias), reference)
            close(packed_product(x, weight, INT4, bias), reference)


def test_a_captured_graph_serves_other_contents() -> None:
    """A layer of few rows, one of many, and a scaled embedding; nothing is read on the host while they are captured."""
    weight = random_rows(INT4, 3000, device="cuda")
    layer = PackedLinear(weight, INT4, torch.randn(3000, device="cuda").bfloat16())
    table = PackedEmbedding(weight, INT4, torch.bfloat16, scale=71.55)
    for rows in (1, 32, FUSED_ROWS + 1):
        tokens = torch.randint(0, 3000, (1, rows), device="cuda")

        def run(tokens: Tensor = tokens) -> Tensor:
            return layer(table(tokens))

        run()  # compiles outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        tokens.copy_(torch.randint(0, 3000, (1, rows)))
        graph.replay()
        rows_of = INT4.dense(weight, torch.bfloat16)[tokens[0]] * torch.tensor(
            71.55, dtype=torch.bfloat16, device="cuda"
        )
        assert torch.equal(table(tokens)[0], rows_of)
        close(out[0], product(rows_of, weight, INT4, layer.bias))


def test_gradients_reach_the_input() -> None:
    weight = random_rows(INT4, 300, device="cuda")
    x = torch.randn(4, INT4.k, device="cuda", requires_grad=True)
    packed_linear(x, weight, INT4).sum().backward()
    assert x.grad is not None
    close(x.grad, INT4.dense(weight).double().sum(0).expand(4, -1))
    close(packed_linear(x.detach(), weight, INT4), torch_linear(x.detach(), weight, INT4).double())
