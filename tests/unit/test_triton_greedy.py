"""The greedy choice in Triton, interpreted on a CPU, against `torch.max`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_rig import check_best_tokens, interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton import greedy

pytestmark = interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 10**9], ids=["wide", "narrow"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred logits are many pieces, of either width."""
    monkeypatch.setattr(greedy, "WIDE", 128)
    monkeypatch.setattr(greedy, "NARROW", 32)
    monkeypatch.setattr(greedy, "PROGRAMS", request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 128), (3, 257)], ids=str)
def test_random_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_best_tokens(torch.randn(shape).to(dtype))


def test_the_first_among_equals() -> None:
    logits = torch.zeros(4, 300)
    logits[1, [299, 130, 40]] = 2.0
    logits[2, 7] = -0.0
    logits[3, :7] = -0.0  # equals the zeros behind it
    check_best_tokens(logits)
    assert greedy.best_tokens(logits)[0].tolist() == [0, 40, 0, 0]
    check_best_tokens(torch.randint(-3, 3, (9, 300)).float())


def test_rows_that_overflowed_name_their_first_nan_and_others_are_untouched() -> None:
    logits = torch.randn(7, 300)
    logits[0] = -torch.inf
    logits[1, 5:] = -torch.inf
    logits[2, [290, 140]] = torch.inf
    logits[3, [200, 150]] = torch.nan
    logits[4, [1, 299]] = torch.tensor([torch.inf, torch.nan])
    logits[5, 0] = -torch.nan
    check_best_tokens(logits)


def test_rows_with_a_stride() -> None:
    wide = torch.randn(5, 400)
    check_best_tokens(wide[:, 37:337])
    check_best_tokens(wide[::2, :300])
    with pytest.raises(ValueError, match="adjacent"):
        greedy.best_tokens(wide[:, ::2])


def test_no_rows() -> None:
    found: Tensor = greedy.best_tokens(torch.randn(0, 30))
    assert found.shape == (2, 0) and found.dtype == torch.int32
