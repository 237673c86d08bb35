"""What packed_few.cu computes around its product: by its source on a CPU (tests/cuda_host), against the kernels that do it
alone. On a GPU: tests/gpu/test_packed_few_gpu.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cuda_rig import H200, Case, built, nearly_equal, plan_of
from kvboost.kernels.cuda import compiler, packed_few
from kvboost.kernels.cuda.packed_few import PRODUCT, Around, FewTile, Gpu, chosen_tile, definitions
from kvboost.kernels.norm import RmsNorm
from kvboost.weights.packing import Packing, Scheme
from packed_rig import packing_id, random_rows
from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.elementwise import act_mul, rms_norm

pytestmark = [interpreted, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]

SMALL, LARGE = torch.bfloat16, torch.float16


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


NORMED = [
    # dtype, packing, tile, rows of x, rows of W, blocks, offset, activation
    (SMALL, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(1, 1, 8, 3, 3, 1), 1, 40, 2, 0.0, None),
    (LARGE, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(2, 1, 4, 2, 2, 4), 3, 74, 1, 0.0, "silu"),
    (SMALL, Packing(Scheme.ZEROS, 4, 8320, 640), FewTile(1, 1, 2, 2, 2, 1), 1, 32, 1, 0.0, "silu"),
    (SMALL, Packing(Scheme.ZEROS, 4, 896, 64), FewTile(2, 1, 4, 2, 2, 2), 2, 54, 1, 1.0, "gelu_tanh"),
    (LARGE, Packing(Scheme.ZEROS, 4, 384, 32), FewTile(1, 1, 2, 2, 2, 8), 7, 33, 2, 1.0, None),
    (LARGE, Packing(Scheme.SYMMETRIC, 4, 2176, 32), FewTile(1, 1, 4, 2, 2, 2), 1, 16, 1, 0.0, None),
    (SMALL, Packing(Scheme.MINIMUM, 4, 640, 128), FewTile(1, 1, 4, 3, 2, 1), 1, 29, 2, 1.0, None),
    (SMALL, Packing(Scheme.TWO_LEVEL, 4, 2816, 32), FewTile(1, 1, 4, 3, 2, 4), 4, 42, 2, 0.0, "gelu"),
]


@pytest.mark.parametrize(
    ("dtype", "packing", "tile", "rows", "n", "blocks", "offset", "activation"),
    NORMED,
    ids=[f"{packing_id(p)}-{t.tiles}x{t.cols}x{t.warps}-{r}rows-{o}-{a}" for _, p, t, r, _, _, o, a in NORMED],
)
def test_normalises(
    dtype: torch.dtype, packing: Packing, tile: FewTile, rows: int, n: int, blocks: int, offset: float,
    activation: str | None, tmp_path: Path,
) -> None:  # fmt: skip
    """The product of what `rms_norm` makes of x. A number of that may be rounded otherwise, which no output depends on much."""
    torch.manual_seed(0)
    x = torch.randn(rows, packing.k).to(dtype) * torch.logspace(-2, 1, rows).to(dtype)[:, None]
    x[:, ::31] *= 40
    norm = RmsNorm(torch.randn(packing.k).to(dtype), 1e-5, offset)
    plan = plan_of(tile, packing, n, blocks, Around.of(norm, activation))
    weight, bias = random_rows(packing, n), torch.randn(n).to(dtype)
    out = built(Case(x, weight, packing), plan, tmp_path)(Case(x, weight, packing, bias, norm=norm))
    normed = rms_norm(x, norm.weight, norm.eps, weight_offset=offset, round_first=norm.round_first)
    apart = Case(normed, weight, packing, bias)
    if activation is None:
        assert ((out.double() - apart.exact()).abs() <= 2 * apart.bound()).all()
    folder = tmp_path / "alone"
    folder.mkdir()
    alone = built(apart, plan_of(tile, packing, n, blocks, Around(activation)), folder)
    nearly_equal(out, alone(apart))


@pytest.fixture
def on_a(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu], None]:
    """Plans launches for a GPU that is not here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))

    def choose(gpu: Gpu) -> None:
        packed_few._launch.cache_clear()
        monkeypatch.setattr(Gpu, "of", lambda *_: gpu)

    yield choose
    packed_few._launch.cache_clear()


NORM, GATE, BOTH = Around(norm=1), Around("silu"), Around("silu", 1)


def test_which_launches_take_what_in(on_a: Callable[[Gpu], None]) -> None:
    """Norms with up to 4 rows of x; activations with any; neither where rows of W are split, or with less room for blocks."""
    device = torch.device("cuda", 0)

    def launches(packing: Packing, n: int, rows: int) -> list[Around]:
        made = [packed_few._launch(device, packing, n, rows, around) for around in (PRODUCT, NORM, GATE, BOTH)]
        for plan in made:
            if plan is not None:
                assert plan.tile == chosen_tile(packing, n, rows, Gpu.of(device))
                assert plan.shared_bytes == plan.tile.shared_bytes(packing, plan.buffers, plan.around)
        return [plan.around for plan in made if plan is not None]

    on_a(H200)
    wide, long = Packing(Scheme.ZEROS, 4, 5120, 128), Packing(Scheme.ZEROS, 4, 18_944, 128)
    for rows in (1, 2, 3, 4):
        assert launches(wide, 55_296, rows) == [PRODUCT, NORM, GATE, BOTH]
        assert launches(wide, 7168, rows) == [PRODUCT, NORM, GATE, BOTH]
    assert launches(wide, 55_296, 5) == launches(wide, 55_296, 16) == [PRODUCT, GATE]
    assert launches(long, 1024, 1) == [PRODUCT]
    on_a(Gpu(24, 100 << 10, 99 << 10))
    assert launches(wide, 55_296, 1) == [PRODUCT, NORM, GATE, BOTH]
    assert launches(wide, 55_296, 4) == [PRODUCT, GATE], "4 rows are too many for shared memory"
    assert launches(Packing(Scheme.ZEROS, 4, 8192, 128), 57_344, 1) == [PRODUCT, GATE], (
        "3 blocks have no room for the norm's weight"
    )


def test_what_does_not_go_together_is_refused() -> None:
    packing = Packing(Scheme.ZEROS, 4, 256, 128)
    x, weight = torch.zeros(2, 256, dtype=LARGE), random_rows(packing, 32)
    good = RmsNorm(torch.ones(256, dtype=LARGE), 1e-6)
    assert packed_few._normalises(good, x) and packed_few._has_halves(weight, "gelu")
    for weights in (good.weight[:128], good.weight.float(), torch.ones(264, dtype=LARGE)[8:][1:], good.weight[None]):
        assert not packed_few._normalises(RmsNorm(weights, 1e-6), x)
    assert not packed_few._normalises(RmsNorm(torch.ones(257, dtype=LARGE)[1:], 1e-6), x), "not at 16 bytes"
    assert not packed_few._has_halves(weight, "relu") and not packed_few._has_halves(weight[:31], "silu")
    with pytest.raises(ValueError, match="without a total"):
        packed_few.packed_few(x, weight, packing, total=torch.zeros(2, 16, dtype=LARGE), activation="silu")
    for wrong in (torch.zeros(2, 32, dtype=LARGE), torch.zeros(2, 16)):
        with pytest.raises(ValueError, match=r"out .* must be a contiguous \[2, 16\]"):
            packed_few.packed_few(x, weight, packing, out=wrong, activation="silu")
    split, cached = FewTile(1, 1, 8, 3, 3, 2, 2), FewTile(2, 1, 8, 2, 2, 0)
    for tile, around in ((split, {"norm": good}), (split, {"activation": "silu"}), (cached, {"norm": good})):
        with pytest.raises(ValueError, match="does not serve"):
            packed_few.packed_few(x, weight, packing, tile=tile, **around)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_registers_suffice(capability: str, tmp_path: Path) -> None:
    """NVRTC keeps everything of the tiles that are chosen in registers, for as many blocks as the rule counts on."""
    reader = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not reader.exists():
        pytest.skip("needs the cuobjdump of Triton")
    made = [(Packing(Scheme.ZEROS, 4, 5120, 128), tile) for tile in
            (FewTile(1, 1, 8, 3, 3, 1), FewTile(2, 1, 8, 2, 2, 1), FewTile(2, 1, 8, 2, 2, 2), FewTile(1, 1, 12, 2, 2, 4))]  # fmt: skip
    made.append((Packing(Scheme.TWO_LEVEL, 4, 5120, 32), FewTile(1, 1, 8, 3, 3, 1)))
    for packing, tile in made:
        for around in (PRODUCT, BOTH, Around("gelu", 2)) if packing.group == 128 else (NORM,):
            flags = definitions(SMALL, packing.scheme, packing.group, tile, around)
            options = [
                f"--gpu-architecture=sm_{capability}",
                "--std=c++17",
                *(f"-D{k}={int(v)}" for k, v in flags.items()),
            ]
            file = tmp_path / "code.cubin"
            file.write_bytes(compiler.nvrtc().compile("packed_few.cu", options))
            told = subprocess.run(
                [str(reader), "-res-usage", str(file)], capture_output=True, text=True, check=True
            ).stdout
            registers, stack = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))
            assert stack == 0, (packing, tile, around)
            assert -(-registers // 8) * 8 * tile.warps * 32 * tile.blocks <= 1 << 16, (packing, tile, around)
