"""Norms, activations and residuals beside products on a GPU: inside the product where that serves them, else in kernels of their
own. Triton's run under its interpreter; a stand-in computes the CUDA product, which tests/unit/test_cuda_packed_around.py tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from packed_rig import random_rows
from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.attention.interface import attach
from kvboost.attention.step import running
from kvboost.kernels.norm import RmsNorm
from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from kvboost.models.fused import gpu
from kvboost.models.fused.fuse import fuse
from kvboost.models.fused.gpu import GpuOps
from kvboost.models.fused.ops import Piece, Product
from kvboost.models.fused.reference import ReferenceStep
from kvboost.weights.modules import PackedLinear
from kvboost.weights.packing import Packing, Scheme

pytestmark = interpreted

PACKING = Packing(Scheme.ZEROS, 4, 128, 128)


class Few:
    """Stands for kernels.cuda.packed_few, and notes what it is asked for. without: what it serves no product with."""

    def __init__(self, without: tuple[str, ...] = (), most_rows: int = 16) -> None:
        self.without, self.most_rows = without, most_rows
        self.asked: list[set[str]] = []

    def serves(self, x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None, **around: Any) -> bool:
        asked = {name for name, value in around.items() if value is not None}
        return x.shape[0] <= self.most_rows and not set(self.without) & asked

    def packed_few(
        self, x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None, *, total: Tensor | None = None,
        out: Tensor | None = None, norm: RmsNorm | None = None, activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        assert total is None or activation is None
        given = {"total": total, "out": out, "norm": norm, "activation": activation}
        self.asked.append({name for name, value in given.items() if value is not None})
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, round_first=norm.round_first)
        y = linear(x, packing.dense(weight).to(x.dtype), bias)
        if activation is not None:
            y = act_mul(y, activation)
        if total is None:
            return y
        return torch.add(total, y, out=total if out is None else out)


class Launches:
    """Counts launches of Triton's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("rms_norm", "add_rms_norm", "act_mul"):
            monkeypatch.setattr(gpu, name, self._noting(name, getattr(gpu, name)))

    def _noting(self, name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.made.append(name)
            return function(*args, **kwargs)

        return noted


def products(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Product, Product, RmsNorm]:
    """x of 2 rows, a packed product with a bias, a dense one of the same numbers, and a norm of x."""
    torch.manual_seed(0)
    weight, bias = random_rows(PACKING, 48), torch.randn(48).to(dtype)
    norm = RmsNorm(torch.randn(128).to(dtype), 1e-5)
    dense = Product(Piece(PACKING.dense(weight).to(dtype), bias))
    return torch.randn(2, 128).to(dtype), Product(Piece(weight, bias, PACKING)), dense, norm


@pytest.mark.parametrize("without", [(), ("norm",), ("activation",), ("norm", "activation")], ids=str)
def test_what_a_product_cannot_take_in_is_done_beside_it(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, launches = Few(without), Launches(monkeypatch)
    monkeypatch.setattr(gpu, "packed_few", few)
    monkeypatch.setattr(gpu, "packed_linear", lambda x, weight, packing, bias: few.packed_few(x, weight, packing, bias))
    x, product, dense, norm = products()
    normed = rms_norm(x, norm.weight, norm.eps)
    projected = linear(normed, dense.pieces[0].weight, dense.pieces[0].bias)

    assert torch.equal(GpuOps().linear(x, product, norm), projected)
    taken = {"norm"} - set(without)
    assert few.asked == [taken] and launches.made == ["rms_norm"] * (not taken)

    few.asked.clear(), launches.made.clear()
    assert torch.equal(GpuOps().gated(x, product, "silu", norm), act_mul(projected, "silu"))
    taken = set() if "activation" in without else {"norm", "activation"} - set(without)
    assert few.asked == [taken]
    assert launches.made == ["rms_norm"] * ("norm" not in taken) + ["act_mul"] * ("activation" not in taken)


def test_a_product_that_adds_leaves_the_norm_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    few, launches = Few(), Launches(monkeypatch)
    monkeypatch.setattr(gpu, "packed_few", few)
    x, product, dense, _ = products()
    residual, norm = torch.randn(2, 48).bfloat16(), RmsNorm(torch.randn(48).bfloat16(), 1e-5)
    before = residual.clone()
    total, inner, left = GpuOps().linear_add_norm(x, product, residual, norm)
    assert inner is total and left is norm and few.asked == [{"total", "out"}] and not launches.made
    assert torch.equal(residual, before) and total.data_ptr() != residual.data_ptr()
    assert torch.equal(total, residual + GpuOps().linear(x, dense))

    apart = torch.randn(2, 96).bfloat16()[:, :48]  # the kernel adds rows that follow one another
    total, inner, left = GpuOps().linear_add_norm(x, product, apart, norm)
    assert left is None and launches.made == ["add_rms_norm"]
    torch.testing.assert_close(total, apart + GpuOps().linear(x, dense), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_dense_weights_are_computed_as_ever(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels in the same order, so the same bits."""
    launches = Launches(monkeypatch)
    x, _, product, norm = products()
    norm = RmsNorm(norm.weight, norm.eps, offset)
    weight, bias, _ = product.pieces[0]
    options: dict[str, Any] = {"weight_offset": offset, "round_first": offset == 0.0}
    normed = rms_norm(x, norm.weight, norm.eps, **options)
    assert torch.equal(GpuOps().linear(x, product, norm), linear(normed, weight, bias))
    assert torch.equal(GpuOps().gated(x, product, "gelu", norm), act_mul(linear(normed, weight, bias), "gelu"))
    assert launches.made == ["rms_norm", "rms_norm", "act_mul"]
    residual, after = torch.randn(2, 48).bfloat16(), RmsNorm(torch.randn(48).bfloat16(), 1e-5, offset)
    total, inner, left = GpuOps().linear_add_norm(x, product, residual, after)
    want, sums = add_rms_norm(linear(x, weight, bias), residual, after.weight, after.eps, **options)
    assert left is None and torch.equal(total, sums) and torch.equal(inner, want)


def packed_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for path, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            rows = random_rows(PACKING, module.out_features, seed=len(path))
            nn.init.normal_(module.bias, 0, 0.3)
            setattr(model.model.get_submodule(parent), name, PackedLinear(rows, PACKING, module.bias))
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            nn.init.normal_(module.weight, 0.2, 0.1)
    assert attach(model)
    return model


@pytest.mark.parametrize(
    ("few", "asked", "made"),
    [
        (Few(), [{"norm"}, {"total", "out"}, {"norm", "activation"}, {"total"}], []),
        (Few(("norm",)), [{"total", "out"}, {"activation"}, {"total"}], ["rms_norm", "rms_norm"]),
        (Few(most_rows=0), [], ["rms_norm", "add_rms_norm", "act_mul"]),
    ],
    ids=["all inside", "norms beside", "all beside"],
)
def test_a_layer(few: Few, asked: list[set[str]], made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Proved equal to the module, with as many launches as its products leave."""
    monkeypatch.setattr(gpu, "packed_few", few)
    launches = Launches(monkeypatch)
    model = packed_llama()
    found = fuse(model, GpuOps(), 64)
    assert (found["layers"], found["attention"], found["mlp"]) == (2, 2, 2)
    ids = torch.tensor([[3, 4, 5]])
    few.asked.clear(), launches.made.clear()
    with torch.no_grad():
        with running(ReferenceStep(packed=True)):
            out = model(input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False).logits
        assert [one for one in few.asked if one] == asked * 2
        assert launches.made == [*made, *made, "rms_norm"], "each layer's, and the last norm"
        torch.testing.assert_close(out, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3)
