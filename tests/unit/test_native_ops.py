"""The C++ products, norms and activations against PyTorch, and the building of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, linear, relu, silu

from kvboost.kernels.native import build, threads
from kvboost.kernels.native.build import NativeUnavailable
from kvboost.kernels.native.library import unavailable
from kvboost.kernels.norm import RmsNorm
from kvboost.models.fused.cpu import CpuOps
from kvboost.models.fused.ops import Piece, Product

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (7, 33), (32, 32), (96, 64), (192, 576), (50, 1000), (4864, 896)]


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    error = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9)
    assert error < (1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 33, 70])
def test_linear(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype)
    wide = torch.randn(rows, shape[1] + 3, dtype=dtype)
    x = wide[:, : shape[1]]  # rows that do not follow one another
    for b in (None, bias):
        out = CpuOps().linear(x, Product(Piece(weight, b)))
        assert out.dtype == dtype
        close(out, linear(x.float(), weight.float(), None if b is None else b.float()), dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("other_units")
def test_linear_by_other_units() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for rows in (1, 5, 16, 17, 33, 50, 70):
                test_linear(dtype, shape, rows)


class LlamaLikeNorm(nn.Module):
    """The norm as Transformers writes it: rounded before the weight (offset 0), or after (Gemma, offset 1)."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 8, 16, 100, 576])
def test_rms_norm(dtype: torch.dtype, offset: float, n: int) -> None:
    torch.manual_seed(n)
    x, weight = torch.randn(5, 3 * n, dtype=dtype), torch.randn(n, dtype=dtype)
    grouped = x.view(5, 3, n)
    expected = LlamaLikeNorm()(grouped, weight, 1e-5, offset)
    norm = RmsNorm(weight, 1e-5, offset)
    close(CpuOps().rms_norm(grouped, norm), expected, dtype)
    inside = x.clone()
    CpuOps().rms_norm(inside.view(5, 3, n), norm, out=inside.view(5, 3, n))
    close(inside.view(5, 3, n), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(6, 77, dtype=dtype), torch.randn(6, 77, dtype=dtype), torch.randn(77, dtype=dtype)
    total, normed = CpuOps().add_rms_norm(x, delta, RmsNorm(weight, 1e-6))
    assert torch.equal(total, x + delta)
    close(normed, LlamaLikeNorm()(x + delta, weight, 1e-6, 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("n", [1, 16, 23, 1536])
def test_gate(dtype: torch.dtype, name: str, n: int) -> None:
    function = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "relu": relu}[name]
    both = torch.randn(9, 2 * n, dtype=dtype) * 4
    gate, up = both.chunk(2, dim=1)
    close(CpuOps().gate(both, name), function(gate) * up, dtype)  # type: ignore[operator]


def test_extreme_gates_stay_finite() -> None:
    both = torch.cat((torch.linspace(-1e4, 1e4, 64), torch.ones(64)))[None]
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        assert torch.isfinite(CpuOps().gate(both, name)).all()


# -- building ------------------------------------------------------------------------------------------------------


def test_a_directory_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    (tmp_path / "kvboost" / "native").mkdir(parents=True)
    (tmp_path / "kvboost" / "native").chmod(0o777)
    with pytest.raises(NativeUnavailable, match="written by others"):
        build.library()


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=r"g\+\+"):
        build.library()


def test_sources_that_do_not_compile_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(NativeUnavailable, match="refused the kernels"):
        build.library()
    assert not list((tmp_path / "kvboost" / "native").iterdir()), "nothing half-made is left"


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    first = build.library()
    assert first.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library() == first


def test_generation_goes_on_without_a_compiler(tmp_path: Path) -> None:
    """The engine says why and computes in PyTorch."""
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from kvboost import KVBoost\n"
        "config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,"
        " num_attention_heads=4, num_key_value_heads=2)\n"
        "with KVBoost.from_model(LlamaForCausalLM(config), num_blocks=16) as kv:\n"
        "    print(len(kv.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).token_ids), kv.attention_backend)\n"
    )
    source = Path(build.__file__).parents[3]
    environment = {**os.environ, "PATH": str(tmp_path), "KVBOOST_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(source)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("4 torch: "), done.stdout + done.stderr
    assert "g++" in done.stdout


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 4),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("150000 100000", 2),
        ("900000 100000", 4),
        ("?", 4),
    ],
)
def test_a_containers_quota_counts(text: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(text)
    assert threads.usable_cores() == cores


def test_threads_are_only_ever_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(threads, "usable_cores", lambda: before + 5)
        assert threads.fit_threads() == before
        monkeypatch.setattr(threads, "usable_cores", lambda: 1)
        assert threads.fit_threads() == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_released_team_comes_back() -> None:
    x = torch.randn(512, 512)
    expected = x @ x
    threads.release_team()
    assert torch.equal(x @ x, expected)
