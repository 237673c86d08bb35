"""The CUDA product of few rows with 4-bit weights on a GPU: every layout, real shapes, and in a row of kernels that start
early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from cuda_rig import nearly_equal
from packed_rig import packing_id, random_rows
from triton_rig import close

pytest.importorskip("triton")

from kvboost.kernels.cuda import workspace
from kvboost.kernels.cuda.packed_few import FewTile, Gpu, chosen_tile, packed_few, planned, serves
from kvboost.kernels.norm import RmsNorm
from kvboost.kernels.triton.elementwise import ACTIVATIONS, act_mul, add_rms_norm, rms_norm
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
            other = torch.empty_like(total)
            close(
                packed_few(x, weight, packing, bias, total=total, out=other), want + product(x, weight, packing, bias)
            )
            close(total, want, (n, rows, "left alone"))


@pytest.mark.parametrize("n, k", [(55_296, 5120), (5120, 27_648), (7168, 5120)])
def test_real_shapes(n: int, k: int) -> None:
    packing = Packing(Scheme.ZEROS, 4, k, 128)
    weight = random_rows(packing, n, device="cuda")
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").half()
        close(packed_product(x, weight, packing), product(x, weight, packing))


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("inner", [3584, 16_384])
def test_kernels_that_start_early_wait_for_their_inputs(inner: int, rows: int) -> None:
    """Layers in a graph, where each kernel starts while the one before runs, against the same with a wait after each. Long rows
    are summed in parts."""
    down, up = Packing(Scheme.ZEROS, 4, inner, 128), Packing(Scheme.ZEROS, 4, 1024, 128)
    first, second = random_rows(up, 2 * inner, 1, "cuda"), random_rows(down, 1024, 2, "cuda")
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


def normalised(x: Tensor, norm: RmsNorm) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, round_first=norm.round_first)


def gates_apart(ungated: Tensor) -> dict[str, Any]:
    """How far gated numbers may be apart: an activation and what it gates may each be one unit off, and far out on the negative
    side of gelu two exponentials cancel, of which the kernels have not the same last bit."""
    gate, up = ungated.float().chunk(2, dim=1)
    return {"units": 3.0, "terms": gate * up}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_norms_and_gates(packing: Packing, dtype: torch.dtype) -> None:
    """As the kernels that do it alone, around the product by the same tile. With more than 4 rows norms are left to those."""
    gpu = Gpu.of(torch.device("cuda", torch.cuda.current_device()))
    turn = 0
    for width in (16, 307, 2560):
        weight, bias = random_rows(packing, 2 * width, device="cuda"), torch.randn(2 * width, device="cuda").to(dtype)
        for rows in ROWS:
            tile = chosen_tile(packing, 2 * width, rows, gpu)
            activation, offset = ACTIVATIONS[turn % 3], float(turn % 2)
            turn += 1
            x = torch.randn(rows, packing.k, device="cuda").to(dtype)
            norm = RmsNorm(torch.randn(packing.k, device="cuda").to(dtype), 1e-6, offset)
            if serves(x, weight, packing, bias, activation=activation):
                ungated = packed_few(x, weight, packing, bias, tile=tile)
                gated = packed_few(x, weight, packing, bias, activation=activation)
                nearly_equal(gated, act_mul(ungated, activation), 0.1, **gates_apart(ungated))
            else:
                assert tile.parts > 1 or 2 * width < 16 * tile.tiles, (width, rows)
            if not serves(x, weight, packing, bias, norm=norm, activation=activation):
                assert rows > 4 or tile.parts > 1 or not tile.x_shared or gpu.shared_bytes < 200 << 10, (width, rows)
                continue
            normed = normalised(x, norm)
            want = packed_few(normed, weight, packing, bias, tile=tile)
            close(packed_few(x, weight, packing, bias, norm=norm), product(normed, weight, packing, bias))
            nearly_equal(packed_few(x, weight, packing, bias, norm=norm), want, 0.1, 0.5)
            both = packed_few(x, weight, packing, bias, norm=norm, activation=activation)
            nearly_equal(both, act_mul(want, activation), 0.3, 0.5, **gates_apart(want))
            assert torch.equal(both, packed_few(x, weight, packing, bias, norm=norm, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_that_every_order_adds_alike(dtype: torch.dtype) -> None:
    """Of small integers, so nothing but the last bit of a root may differ from `rms_norm`."""
    packing = Packing(Scheme.ZEROS, 4, 5120, 128)
    weight = random_rows(packing, 7168, device="cuda")
    norm = RmsNorm(torch.randn(5120, device="cuda").to(dtype), 1e-6)
    for rows in (1, 2, 3, 4):
        x = torch.randint(-9, 10, (rows, 5120), device="cuda").to(dtype)
        out = packed_few(x, weight, packing, norm=norm)
        nearly_equal(out, packed_few(normalised(x, norm), weight, packing), 0.05, 0.5)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("inner", [3584, 16_384])
def test_norms_wait_for_their_rows(inner: int, rows: int) -> None:
    """Layers of two launches, of which each starts while the one before runs, in a graph; against the same with a wait after each,
    where every layer answers as kernels do that normalise, multiply and gate one after the other."""
    down, up = Packing(Scheme.ZEROS, 4, inner, 128), Packing(Scheme.ZEROS, 4, 1024, 128)
    first, second = random_rows(up, 2 * inner, 1, "cuda"), random_rows(down, 1024, 2, "cuda")
    norm = RmsNorm(torch.rand(1024, device="cuda").half() + 0.5, 1e-6)
    start = torch.randn(rows, 1024, device="cuda").half()
    tile = chosen_tile(up, 2 * inner, rows, Gpu.of(start.device))
    assert serves(start, first, up, norm=norm, activation="silu")

    def layer(x: Tensor, pause: bool) -> Tensor:
        hidden = packed_few(x, first, up, norm=norm, activation="silu")
        if pause:
            torch.cuda.synchronize()
        return packed_few(hidden, second, down, total=x, out=torch.empty_like(x))

    want = start
    for _ in range(20):
        hidden = packed_few(want, first, up, norm=norm, activation="silu")
        torch.cuda.synchronize()
        apart = packed_few(normalised(want, norm), first, up, tile=tile)
        nearly_equal(hidden, act_mul(apart, "silu"), 0.3, 0.5, **gates_apart(apart))
        want = layer(want, True)
        torch.cuda.synchronize()
    assert want.isfinite().all()

    def run() -> Tensor:
        x = start
        for _ in range(20):
            x = layer(x, False)
        return x

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    before = start.clone()
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, want)
    assert torch.equal(run(), want) and torch.equal(start, before)


SPLIT = [Packing(Scheme.ZEROS, 4, 27_648, 128), Packing(Scheme.ZEROS, 4, 9600, 640), Packing(Scheme.ZEROS, 4, 4224, 64),
         Packing(Scheme.SYMMETRIC, 4, 4224, 32), Packing(Scheme.MINIMUM, 4, 4224, 128), Packing(Scheme.TWO_LEVEL, 4, 5376, 32)]  # fmt: skip


@pytest.mark.parametrize("packing", SPLIT, ids=packing_id)
@pytest.mark.parametrize("parts", [2, 3, 6, 9])
def test_parts(packing: Packing, parts: int) -> None:
    """Of rows that are split, in whatever order they are ready."""
    gpu = Gpu.of(torch.device("cuda", torch.cuda.current_device()))
    for n in (307, 5120):
        weight, bias = random_rows(packing, n, device="cuda"), torch.randn(n, device="cuda").half()
        for rows, tile in ((1, FewTile(1, 1, 8, 3, 3, 1, parts)), (3, FewTile(2, 1, 8, 2, 2, 4, parts)),
                           (7, FewTile(2, 1, 8, 2, 2, 0, parts)), (16, FewTile(2, 2, 4, 2, 2, 0, parts))):  # fmt: skip
            shared = planned(tile, packing, n, gpu).shared_bytes
            if shared > gpu.block_shared_bytes or not workspace.holds(parts, rows, n):
                continue
            x = torch.randn(rows, packing.k, device="cuda").half()
            want = product(x, weight, packing, bias)
            out = packed_few(x, weight, packing, bias, tile=tile)
            close(out, want, (n, rows))
            for _ in range(20):
                assert torch.equal(packed_few(x, weight, packing, bias, tile=tile), out), "the order of sums is fixed"
            total = torch.randn(rows, n, device="cuda").half()
            want = want + total
            close(packed_few(x, weight, packing, bias, total=total, tile=tile), want, (n, rows, "total"))
    assert_ready()


def assert_ready() -> None:
    torch.cuda.synchronize()
    assert not any(space.counters.any() for space in workspace._workspaces.values())


def long_products(rows: int) -> list[tuple[Tensor, Tensor, Packing]]:
    """Of shapes that are split on large GPUs, into numbers of parts that differ."""
    made = []
    for seed, (n, k) in enumerate([(5120, 27_648), (1024, 18_944), (2048, 11_008), (3584, 28_672)]):
        packing = Packing(Scheme.ZEROS, 4, k, 128)
        x = torch.randn(rows, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).half()
        made.append((x, random_rows(packing, n, seed, "cuda"), packing))
    return made


@pytest.mark.parametrize("rows", [1, 4])
def test_a_graph_of_split_rows_is_replayed(rows: int) -> None:
    """Shapes in turn, and launches outside of the graph between replays of it."""
    case = long_products(rows)
    gpu = Gpu.of(case[0][0].device)
    assert gpu.processors < 100 or len({chosen_tile(p, len(w), rows, gpu).parts for _, w, p in case} - {1}) > 1
    want = [packed_product(*one) for one in case]
    for one, out in zip(case, want, strict=True):
        close(out, product(*one))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [packed_product(*one) for _ in range(5) for one in case]
    for turn in range(100):
        for out in outs:
            out.zero_()
        graph.replay()
        if turn % 3 == 0:
            assert torch.equal(packed_product(*case[turn % 4]), want[turn % 4])
        assert all(torch.equal(out, want[i % 4]) for i, out in enumerate(outs)), turn
    assert_ready()


def test_streams_do_not_disturb_each_other() -> None:
    case = long_products(1)
    want = [packed_product(*one) for one in case]
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs: list[list[Tensor]] = [[] for _ in streams]
    torch.cuda.synchronize()
    for turn in range(60):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[place].append(packed_product(*case[(turn + place) % 4]))
    torch.cuda.synchronize()
    for place, made in enumerate(outs):
        assert all(torch.equal(out, want[(turn + place) % 4]) for turn, out in enumerate(made))
    assert_ready()
