"""The choice of experts in Triton, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from experts_rig import check_route
from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.router import route

pytestmark = interpreted


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 4, 1), (5, 7, 3), (3, 128, 8), (2, 60, 4), (1, 2, 2)])
def test_equals_softmax_and_topk(tokens: int, experts: int, top: int, renormalise: bool) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = (3 * torch.randn(tokens, experts)).to(dtype)
        check_route(logits, top, renormalise)
        check_route((2 * logits).round(), top, renormalise)  # many are equal


def test_what_overflowed_still_chooses_experts_that_exist() -> None:
    logits = torch.randn(5, 9)
    logits[0, 3], logits[1, 2], logits[3], logits[4, 5] = torch.nan, torch.inf, -torch.inf, -torch.nan
    weights, index = route(logits, 4, True, torch.float32)
    for row in (0, 1, 3, 4):
        assert index[row].tolist() == [0, 1, 2, 3] and weights[row].isnan().all()
    check_route(logits[2:3], 4, True)


def test_rows_may_be_parts_of_others() -> None:
    check_route(torch.randn(4, 30)[:, 5:21], 3, True)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="top=5 of logits"):
        route(torch.zeros(2, 4), 5, True, torch.float32)
    with pytest.raises(ValueError, match="adjacent"):
        route(torch.zeros(4, 2).T, 1, True, torch.float32)
    assert route(torch.zeros(0, 4), 2, True, torch.float32)[1].shape == (0, 2)
