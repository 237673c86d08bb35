"""The linear layer for few rows in Triton, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from triton_rig import close, interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton import skinny
from kvboost.kernels.triton.skinny import SkinnyTile, faster_than_cublas, skinny_linear

pytestmark = interpreted


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (100, 200), (33, 513), (16, 16)])
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_equals_linear(rows: int, n: int, k: int, bias: bool) -> None:
    x, weight = torch.randn(rows, k), torch.randn(n, k)
    b = torch.randn(n) if bias else None
    expected = linear(x.double(), weight.double(), None if b is None else b.double())
    for splits in (1, 3):
        close(skinny_linear(x, weight, b, tile=SkinnyTile(32, 64, splits, 4, 3)), expected)
        total = torch.randn(rows, n)
        sum_of_both = total.double() + expected
        added = skinny_linear(x, weight, b, total=total, tile=SkinnyTile(32, 64, splits, 4, 3))
        assert added is total
        close(total, sum_of_both)
    close(skinny_linear(x, weight, b), expected)


def test_weights_and_inputs_may_be_parts_of_others() -> None:
    around, beside = torch.full((90, 256), float("nan")), torch.full((3, 300), float("nan"))
    weight, x = around[10:74, :100], beside[:, 100:200]
    weight.normal_()
    x.normal_()
    for splits in (1, 2):
        close(skinny_linear(x, weight, tile=SkinnyTile(32, 64, splits, 4, 3)), linear(x.double(), weight.double()))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(65, 32), torch.randn(8, 32)
    with pytest.raises(ValueError, match="1 to 64 rows, not 65"):
        skinny_linear(x, weight)
    with pytest.raises(ValueError, match="does not fit weight"):
        skinny_linear(x[:2], weight[:, :16])
    with pytest.raises(ValueError, match="does not fit weight"):
        skinny_linear(x[:2].half(), weight)
    with pytest.raises(ValueError, match=r"bias \(7,\)"):
        skinny_linear(x[:2], weight, torch.zeros(7))
    with pytest.raises(ValueError, match=r"total \(2, 7\)"):
        skinny_linear(x[:2], weight, total=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="must be contiguous"):
        skinny_linear(x[:2], weight, total=torch.zeros(8, 2).T)


def test_shapes_for_which_cublas_is_faster_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def faster(rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return faster_than_cublas(torch.empty(rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype))

    assert not faster(1, 37_888, 3584), "no GPU, nothing measured"
    monkeypatch.setattr(skinny, "starts_early", lambda device: True)
    assert [faster(rows, 4608, 3584) for rows in (1, 16, 17, 32)] == [True, True, False, False]
    for n, k in ((3584, 3584), (37_888, 3584), (3584, 18_944), (5120, 27_648)):
        assert [faster(rows, n, k) for rows in (1, 32, 33)] == [True, True, False]
    assert not faster(1, 576, 576) and not faster(1, 4096, 4000) and not faster(1, 4096, 4096, torch.float32)
