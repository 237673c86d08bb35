"""The CUDA product of few rows with 4-bit weights: its source on a CPU (tests/cuda_host), by NVIDIA's compiler, and how it is
launched. On a GPU: tests/gpu/test_packed_few_gpu.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cuda_rig import H200, RTX, Case, built, plan_of
from kvboost.kernels.cuda import compiler, packed_few
from kvboost.kernels.cuda.compiler import CudaUnavailable
from kvboost.kernels.cuda.packed_few import FewTile, Gpu, Launch, chosen_tile, definitions, knows, planned
from kvboost.weights.packing import Packing, Scheme
from packed_rig import packing_id, random_rows

SMALL, LARGE = torch.bfloat16, torch.float16
LONG = Packing(Scheme.ZEROS, 4, 27_648, 128)

CASES = [
    # dtype, packing, tile, rows of x, rows of W, blocks of each part
    (SMALL, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(1, 1, 8, 3, 3, 1), 1, 40, 2),
    (LARGE, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(1, 1, 8, 3, 3, 4), 3, 35, 1),
    (LARGE, Packing(Scheme.ZEROS, 4, 1280, 640), FewTile(2, 1, 4, 2, 2, 0), 7, 33, 2),
    (SMALL, Packing(Scheme.ZEROS, 4, 640, 64), FewTile(2, 2, 4, 2, 2, 0), 19, 47, 1),
    (LARGE, Packing(Scheme.ZEROS, 4, 640, 64), FewTile(1, 1, 4, 3, 2, 2), 2, 16, 1),
    (SMALL, Packing(Scheme.ZEROS, 4, 384, 32), FewTile(1, 1, 4, 2, 2, 8), 8, 17, 2),
    (SMALL, Packing(Scheme.SYMMETRIC, 4, 384, 32), FewTile(1, 1, 2, 2, 2, 0), 5, 48, 3),
    (LARGE, Packing(Scheme.SYMMETRIC, 4, 256, 128), FewTile(1, 1, 4, 2, 2, 1), 1, 16, 1),
    (SMALL, Packing(Scheme.MINIMUM, 4, 640, 128), FewTile(1, 1, 4, 3, 2, 1), 1, 33, 2),
    (LARGE, Packing(Scheme.MINIMUM, 4, 384, 32), FewTile(1, 1, 2, 4, 2, 2), 2, 20, 1),
    (SMALL, Packing(Scheme.TWO_LEVEL, 4, 768, 32), FewTile(1, 1, 4, 3, 2, 4), 4, 37, 2),
    (LARGE, Packing(Scheme.TWO_LEVEL, 4, 512, 32), FewTile(2, 1, 4, 2, 2, 0), 6, 64, 1),
    # split rows: parts of one length and of several, that begin within what 16 bytes hold, a group or a super-block
    (LARGE, Packing(Scheme.ZEROS, 4, 4096, 128), FewTile(1, 1, 4, 3, 3, 1, 3), 1, 40, 2),
    (SMALL, Packing(Scheme.ZEROS, 4, 1280, 128), FewTile(1, 1, 2, 2, 2, 4, 10), 3, 35, 1),
    (LARGE, Packing(Scheme.ZEROS, 4, 1280, 640), FewTile(2, 1, 4, 2, 2, 0, 3), 7, 33, 2),
    (SMALL, Packing(Scheme.ZEROS, 4, 2560, 64), FewTile(2, 2, 4, 2, 2, 0, 3), 19, 47, 1),
    (LARGE, Packing(Scheme.ZEROS, 4, 1408, 32), FewTile(1, 1, 4, 2, 2, 8, 4), 8, 17, 2),
    (SMALL, Packing(Scheme.SYMMETRIC, 4, 1408, 32), FewTile(1, 1, 4, 3, 2, 2, 2), 2, 48, 3),
    (LARGE, Packing(Scheme.SYMMETRIC, 4, 2560, 128), FewTile(1, 1, 4, 2, 2, 1, 6), 1, 16, 1),
    (SMALL, Packing(Scheme.MINIMUM, 4, 2560, 128), FewTile(1, 1, 4, 3, 2, 1, 3), 1, 33, 2),
    (LARGE, Packing(Scheme.MINIMUM, 4, 1152, 32), FewTile(1, 1, 2, 4, 2, 2, 2), 2, 20, 1),
    (SMALL, Packing(Scheme.TWO_LEVEL, 4, 2816, 32), FewTile(1, 1, 4, 3, 2, 4, 3), 4, 37, 2),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("dtype", "packing", "tile", "rows", "n", "blocks"),
    CASES,
    ids=[f"{packing_id(p)}-{t.tiles}x{t.cols}x{t.warps}-x{t.x_shared}-{r}rows-{t.parts}" for _, p, t, r, _, _ in CASES],
)
def test_arithmetic(
    dtype: torch.dtype, packing: Packing, tile: FewTile, rows: int, n: int, blocks: int, tmp_path: Path
) -> None:
    """On a CPU, thread by thread. The reference is computed in float64 from the weights themselves."""
    torch.manual_seed(0)
    x = torch.randn(rows, packing.k).to(dtype)
    x[:, ::31] *= 40  # outliers, as real activations have them
    plain = Case(x, random_rows(packing, n), packing)
    apart = torch.nn.functional.pad(plain.weight, (0, 64), value=255)[:, : packing.row_bytes]
    added = Case(x, apart, packing, torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype))
    product = built(plain, plan_of(tile, packing, n, blocks), tmp_path)
    for case in (plain, added):
        assert ((product(case).double() - case.exact()).abs() <= case.bound()).all()
    assert torch.equal(product(added, in_place=True), product(added))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("dtype", [SMALL, LARGE], ids=str)
def test_compiles_for_gpus(capability: tuple[int, int], dtype: torch.dtype) -> None:
    """By NVRTC itself, from the package that PyTorch's CUDA wheels depend on."""
    code = compiler.nvrtc()
    for packing in (Packing(Scheme.ZEROS, 4, 5120, 128), Packing(Scheme.TWO_LEVEL, 4, 5120, 32), LONG):
        for rows in (1, 4, 8, 16) if packing is not LONG else (1, 4):
            tile = chosen_tile(packing, 5120, rows, H200 if capability[0] == 9 or packing is LONG else RTX)
            assert (tile.parts > 1) == (packing is LONG)
            made = definitions(dtype, packing.scheme, packing.group, tile)
            options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
            binary = code.compile("packed_few.cu", [*options, *(f"-D{k}={int(v)}" for k, v in made.items())])
            assert binary[:4] == b"\x7fELF" and b"packed_few" in binary


def test_what_does_not_compile_is_told_with_the_compilers_words() -> None:
    with pytest.raises(CudaUnavailable, match=r"(?s)NVRTC .* refused packed_few.cu .*BF16"):
        compiler.nvrtc().compile("packed_few.cu", ["--gpu-architecture=sm_90"])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    return tmp_path / "kvboost" / "cuda"


class Counting:
    version = "1.0"

    def __init__(self) -> None:
        self.calls = 0

    def compile(self, source: str, options: list[str]) -> bytes:
        self.calls += 1
        return b"code" + " ".join(options).encode()


def test_code_is_kept_between_starts(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Counting()
    monkeypatch.setattr(compiler, "nvrtc", lambda: fake)
    first = compiler.cubin("packed_few.cu", {"A": 1}, (9, 0))
    assert compiler.cubin("packed_few.cu", {"A": 1}, (9, 0)) == first and fake.calls == 1
    compiler.cubin("packed_few.cu", {"A": 2}, (9, 0))
    compiler.cubin("packed_few.cu", {"A": 1}, (8, 9))
    fake.version = "1.1"
    compiler.cubin("packed_few.cu", {"A": 1}, (9, 0))
    assert fake.calls == 4 and len(list(own_cache.iterdir())) == 4
    assert own_cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "cut off", "altered"])
def test_a_torn_file_is_made_again(damage: bytes | None, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Counting()
    monkeypatch.setattr(compiler, "nvrtc", lambda: fake)
    first = compiler.cubin("packed_few.cu", {}, (9, 0))
    [file] = own_cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    assert compiler.cubin("packed_few.cu", {}, (9, 0)) == first and fake.calls == 2
    assert file.read_bytes() == whole


def test_a_file_that_is_removed_meanwhile_is_made_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "nvrtc", Counting)
    first = compiler.cubin("packed_few.cu", {}, (9, 0))

    def gone(path: Path) -> bool:
        if path.is_file():
            path.unlink()
            raise FileNotFoundError(path)
        return True

    monkeypatch.setattr(compiler, "is_private", gone)
    assert compiler.cubin("packed_few.cu", {}, (9, 0)) == first


def test_code_that_others_may_write_is_not_loaded(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "nvrtc", Counting)
    compiler.cubin("packed_few.cu", {}, (9, 0))
    next(own_cache.iterdir()).chmod(0o622)
    with pytest.raises(CudaUnavailable, match="KVBOOST_CACHE_DIR"):
        compiler.cubin("packed_few.cu", {}, (9, 0))
    own_cache.chmod(0o777)  # the directory: nothing is kept or taken there
    assert compiler.cubin("packed_few.cu", {}, (9, 0)).startswith(b"code")


@pytest.mark.parametrize("place", ["/proc/nowhere", "~nobody-of-this-name/x"])
def test_a_directory_that_cannot_be_made_only_costs_time(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", place)
    monkeypatch.setattr(compiler, "nvrtc", Counting)
    assert compiler.cubin("packed_few.cu", {}, (9, 0)).startswith(b"code")


def test_which_layouts_it_knows() -> None:
    known = [(Scheme.ZEROS, 4, 5120, 128), (Scheme.ZEROS, 4, 640, 640), (Scheme.SYMMETRIC, 4, 128, 32),
             (Scheme.MINIMUM, 4, 256, 64), (Scheme.TWO_LEVEL, 4, 256, 32)]  # fmt: skip
    others = [Packing(Scheme.ZEROS, 4, 576, 64), Packing(Scheme.ZEROS, 4, 384, 96), Packing(Scheme.SYMMETRIC, 8, 512, 128),
              Packing(Scheme.ZEROS, 4, 512, 128, 4), Packing(Scheme.TWO_LEVEL, 5, 512, 32)]  # fmt: skip
    assert all(knows(Packing(*given)) for given in known) and not any(map(knows, others))


def test_a_machine_without_a_gpu_is_not_served() -> None:
    packing = Packing(Scheme.ZEROS, 4, 256, 128)
    x, weight = torch.zeros(1, 256, dtype=torch.bfloat16), random_rows(packing, 32)
    assert not packed_few.serves(x, weight, packing)


def test_what_does_not_fit_is_left_to_the_kernel_that_says_so() -> None:
    packing = Packing(Scheme.ZEROS, 4, 256, 128)
    fit = packed_few._fit_each_other
    x, weight = torch.zeros(2, 256, dtype=torch.float16), random_rows(packing, 32)
    bias = torch.zeros(32, dtype=torch.float16)
    assert fit(x, weight, packing, None) and fit(x, weight, packing, bias)
    wider = torch.zeros(32, packing.row_bytes + 64, dtype=torch.uint8)[:, : packing.row_bytes]
    assert fit(x, wider, packing, None), "rows may lie apart"
    assert not fit(x, weight[:, :-16], packing, None)
    assert not fit(x, weight.to(torch.int8), packing, None)
    assert not fit(x[:, :128], weight, packing, None)
    assert not fit(x.float(), weight, packing, None)
    assert not fit(torch.zeros(17, 256, dtype=torch.float16), weight, packing, None)
    assert not fit(torch.zeros(2, 260, dtype=torch.float16)[:, 4:], weight, packing, None), "not at 16 bytes"
    for wrong in (bias[:7], torch.zeros(64, dtype=torch.float16)[::2], bias.float()):
        assert not fit(x, weight, packing, wrong)
    for total in (bias, torch.zeros(2, 32), torch.zeros(32, 2, dtype=torch.float16).T):
        with pytest.raises(ValueError, match="total"):
            packed_few.packed_few(x, weight, packing, total=total)
    with pytest.raises(ValueError, match="does not serve"):
        packed_few.packed_few(x, weight, packing, tile=FewTile(1, 1, 8, 3, 3, 1))


def test_a_kernel_that_cannot_be_had_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def fails(*key: object) -> None:
        tried.append(key)
        raise CudaUnavailable("NVRTC was not found")

    packing = Packing(Scheme.ZEROS, 4, 256, 128)
    launches = {rows: chosen_tile(packing, 64, rows, H200) for rows in range(1, 17)}
    monkeypatch.setattr(packed_few, "_failed", {})
    monkeypatch.setattr(packed_few, "_kernel", fails)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(packed_few, "_launch", lambda d, p, n, rows, around: Launch(launches[rows], 1, 1, 0))
    for _ in range(3):
        for rows in range(1, 17):
            assert not packed_few._has_kernel(torch.device("cuda", 0), LARGE, packing, 64, rows)
    assert len(tried) == len(set(launches.values()))
    assert caplog.text.count("NVRTC was not found") == 1


def test_16_rows_of_a_weight_are_served() -> None:
    packing = Packing(Scheme.ZEROS, 4, 512, 128)
    for rows in (1, 2, 4):
        assert chosen_tile(packing, 16, rows, H200).tiles == 1


@pytest.mark.parametrize("gpu", [H200, RTX], ids=["H200", "RTX"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(5120, 5120), (5120, 27_648), (55_296, 5120), (1024, 4096), (4096, 14_336)])
def test_launches_fit_the_gpu(gpu: Gpu, rows: int, n: int, k: int) -> None:
    packing = Packing(Scheme.ZEROS, 4, k, 128)
    tile = chosen_tile(packing, n, rows, gpu)
    plan = planned(tile, packing, n, gpu)
    assert plan.shared_bytes <= gpu.block_shared_bytes
    tiles = -(-n // (16 * tile.tiles))
    beside = min(tile.blocks, gpu.shared_bytes // (plan.shared_bytes + packed_few.RESERVED_BYTES))
    of_a_part = plan.blocks // tile.parts
    assert beside >= 1 and of_a_part == min(tiles, gpu.processors * beside // tile.parts)
    assert of_a_part * tile.parts == plan.blocks and plan.buffers == (1 if tiles <= of_a_part else 2)
    assert tile.x_shared in (0, 1, 2, 4) and (tile.x_shared == 0 or rows <= tile.x_shared)
    assert tile.x_shared or tile.depth % 2 == 0
