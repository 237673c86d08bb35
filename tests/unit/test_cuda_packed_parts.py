"""Rows of W in parts, each summed by other blocks: how they find one another's sums, in which memory, and when rows are split.
By the source of packed_few.cu on a CPU (tests/cuda_host). On a GPU: tests/gpu/test_packed_few_gpu.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cuda_rig import H200, RTX, Case, HostKernel, built, dirty_workspace, plan_of
from kvboost.kernels.cuda import packed_few, workspace
from kvboost.kernels.cuda.compiler import CudaUnavailable
from kvboost.kernels.cuda.packed_few import FewTile, Gpu, chosen_tile, definitions, planned
from kvboost.weights.packing import Packing, Scheme
from packed_rig import random_rows

GATE_UP, OUT, QKV, DOWN = (55_296, 5120), (5120, 5120), (7168, 5120), (5120, 27_648)


def case_of(rows: int, n: int, k: int, seed: int) -> Case:
    torch.manual_seed(seed)
    packing = Packing(Scheme.ZEROS, 4, k, 128)
    x, bias, total = torch.randn(rows, k), torch.randn(n), torch.randn(rows, n)
    return Case(x.half(), random_rows(packing, n, seed), packing, bias.half(), total.half())


@pytest.fixture(
    scope="module", params=[FewTile(1, 1, 4, 3, 3, 2, 3), FewTile(1, 2, 2, 2, 2, 0, 4)], ids=["shared", "cache"]
)
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """2 rows of x, or 18 in two columns of blocks, by 83 of W: 6 tiles, the last of which overlaps, for 2 blocks a part."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    tile = request.param
    case = case_of(2 if tile.x_shared else 18, 83, 2304, 1)
    run = built(case, plan_of(tile, case.packing, 83, 2), tmp_path_factory.mktemp("parts"))
    return SimpleNamespace(tile=tile, case=case, run=run)


def test_parts_are_added_in_their_order_whenever_they_come(product: SimpleNamespace) -> None:
    """With one block at a time, which must not wait for another, up to all at once; launch after launch in one workspace."""
    space, case = dirty_workspace(), product.case
    first = None
    for seed in range(4):
        for together in (1, 2, 5, 1000):
            out = product.run(case, space, together, seed)
            assert not space.counters.any(), "ready for the next launch"
            first = out if first is None else first
            assert torch.equal(out, first)
    rows, n = first.shape
    partials = space.partials[: product.tile.parts * rows * n].view(-1, rows, n)
    want = torch.zeros(rows, n)
    for part in partials:
        want = want + part
    assert torch.equal(first, (want + case.bias.float() + case.total.float()).half())
    assert ((first.double() - case.exact()).abs() <= case.bound()).all()


def test_shapes_take_turns_in_one_workspace(product: SimpleNamespace, tmp_path: Path) -> None:
    """Whose counters lie over one another, though they have other parts."""
    other = case_of(1, 200, 1280, 2)
    run_other = built(other, plan_of(FewTile(1, 1, 2, 2, 2, 1, 5), other.packing, 200, 3), tmp_path)
    want, want_other, space = product.run(product.case), run_other(other), dirty_workspace()
    for seed in range(3):
        assert torch.equal(product.run(product.case, space, 3, seed), want)
        assert torch.equal(run_other(other, space, 4, seed), want_other)
        assert torch.equal(run_other(other, space, 2, seed + 9), want_other)


@pytest.mark.parametrize("scheme, group", [(Scheme.ZEROS, 128), (Scheme.ZEROS, 32), (Scheme.ZEROS, 1024),
                                           (Scheme.SYMMETRIC, 64), (Scheme.MINIMUM, 32), (Scheme.TWO_LEVEL, 32)])  # fmt: skip
def test_room_for_what_a_part_has_beside_its_codes(scheme: Scheme, group: int) -> None:
    """Two pieces, each from one multiple of 16 bytes to another."""
    for k in range(1024, 32_768, 1024):
        packing = Packing(scheme, 4, k, group)
        at = packing.beside_at - packing.scales_at
        for parts in (2, 3, 5, 7, 8):
            room = FewTile(1, 1, 8, 3, 3, 1, parts).tail_bytes(packing)
            for part in range(parts):
                first, last = (128 * (p * (k // 128) // parts) for p in (part, part + 1))
                if scheme is Scheme.TWO_LEVEL:
                    pieces = piece(first, last, 256, 32, 0) + piece(first, last, 32, 16, at)
                else:
                    beside_bits = {Scheme.ZEROS: 4, Scheme.MINIMUM: 16}.get(scheme, 0)
                    pieces = piece(first, last, group, 16, 0) + piece(first, last, group, beside_bits, at)
                assert pieces <= room and room % 32 == 16


def piece(first: int, last: int, group: int, bits: int, at: int) -> int:
    """Bytes that hold `bits` for every group of weights of which one is in [first, last); they begin `at` bytes."""
    begin, end = first // group * bits // 8, -(-(-(-last // group) * bits) // 8)
    return (-(-(at + end) // 16) - (at + begin) // 16) * 16 if bits else 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_long_rows_of_few_tiles_are_split(rows: int) -> None:
    packing = Packing(Scheme.ZEROS, 4, DOWN[1], 128)
    tile = chosen_tile(packing, DOWN[0], rows, H200)
    plan = planned(tile, packing, DOWN[0], H200)
    assert tile.parts > 1 and tile.blocks * (plan.shared_bytes + packed_few.RESERVED_BYTES) <= H200.shared_bytes
    whole = FewTile(1, 1, 12, 2, 2, tile.x_shared)
    assert packed_few._busy(tile, packing, DOWN[0], H200) > 1.3 * packed_few._busy(whole, packing, DOWN[0], H200)
    assert plan.blocks > 0.9 * tile.blocks * H200.processors


@pytest.mark.parametrize("n, k", [GATE_UP, OUT, QKV, (57_344, 8192), (28_672, 4096)])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16])
def test_other_rows_are_not(n: int, k: int, rows: int) -> None:
    for gpu in (H200, RTX):
        assert chosen_tile(Packing(Scheme.ZEROS, 4, k, 128), n, rows, gpu).parts == 1


def test_tiles_of_whole_rows_are_those_that_were_measured() -> None:
    for (n, k), want in {GATE_UP: (1, 8, 3, 3), OUT: (1, 8, 3, 3), QKV: (2, 8, 3, 2)}.items():
        for rows in (1, 2):
            tile = chosen_tile(Packing(Scheme.ZEROS, 4, k, 128), n, rows, H200)
            assert (tile.tiles, tile.warps, tile.depth, tile.blocks) == want
        assert chosen_tile(Packing(Scheme.ZEROS, 4, k, 128), n, 4, H200) == FewTile(1, 1, 12, 2, 2, 4)


def test_what_cannot_be_split_is_told() -> None:
    packing = Packing(Scheme.ZEROS, 4, 512, 128)
    x, weight = torch.zeros(1, 512, dtype=torch.float16), random_rows(packing, 32)
    with pytest.raises(ValueError, match="does not serve"):
        packed_few.packed_few(x, weight, packing, tile=FewTile(1, 1, 8, 3, 3, 1, 5))
    assert packed_few._can(FewTile(1, 1, 8, 3, 3, 4, 8), Packing(Scheme.ZEROS, 4, 8192, 128), 16_384, 4)
    assert not packed_few._can(FewTile(1, 1, 8, 3, 3, 4, 8), Packing(Scheme.ZEROS, 4, 8192, 128), 16_400, 4)


def test_counters_suffice_wherever_partial_sums_do() -> None:
    for rows in range(1, 17):
        for n in range(16, workspace.MOST_PARTIALS, 997):
            if workspace.holds(2, rows, n):
                assert -(-n // 16) * -(-rows // 8) <= workspace.MOST_COUNTERS


class Cuda:
    """What of torch.cuda a workspace asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing, self.waits = 0, False, 0
        monkeypatch.setattr(workspace, "_workspaces", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @property
    def cuda_stream(self) -> int:
        return self.stream

    def synchronize(self) -> None:
        self.waits += 1

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


def test_each_stream_and_the_captured_launches_have_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = Cuda(monkeypatch), torch.device("cpu")
    first = workspace.workspace_of(device)
    cuda.stream = 7
    second = workspace.workspace_of(device)
    cuda.capturing = True
    captured = workspace.workspace_of(device)
    cuda.stream = 8
    assert workspace.workspace_of(device) is captured, "whatever stream is captured on"
    cuda.capturing, cuda.stream = False, 0
    assert workspace.workspace_of(device) is first
    assert len({space.counters.data_ptr() for space in (first, second, captured)}) == 3
    assert cuda.waits == 3 and not any(space.counters.any() for space in (first, second, captured))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_call_launches_the_kernel_with_the_workspace_of_its_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`packed_few` itself, where only the device is not a GPU."""
    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(packed_few.Gpu, "of", lambda device: Gpu(1, 228 << 10, 227 << 10))
    tile = FewTile(1, 1, 4, 3, 3, 1, 3)
    case = case_of(1, 50, 2048, 3)
    made = definitions(torch.float16, case.packing.scheme, case.packing.group, tile)
    kernel = HostKernel("packed_few", made, tmp_path)
    monkeypatch.setattr(packed_few, "_kernel", lambda *key: kernel)
    total = case.total.clone()
    for _ in range(2):
        out = packed_few.packed_few(
            case.x, case.weight, case.packing, case.bias, total=total.copy_(case.total), tile=tile
        )
        assert out is total and ((out.double() - case.exact()).abs() <= case.bound()).all()
    [space] = {s for (_, stream), s in workspace._workspaces.items() if stream != workspace.CAPTURED}
    assert space.partials[: 3 * 50].all() and not space.counters.any()


def test_no_workspace_is_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and its zeros would be the graph's."""
    cuda, device = Cuda(monkeypatch), torch.device("cpu")
    cuda.capturing = True
    for ask in (workspace.prepare, workspace.workspace_of):
        with pytest.raises(CudaUnavailable, match="once before"):
            ask(device)
    cuda.capturing = False
    workspace.prepare(device)
    cuda.capturing = True
    assert workspace.workspace_of(device).counters.numel() == workspace.MOST_COUNTERS
