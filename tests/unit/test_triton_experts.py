"""Mixtures of experts in Triton, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from experts_rig import Mixture, build, expected
from triton_rig import close, interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.experts import ExpertsTile, ProductTile, chosen_tile, routed_experts, tokens_of_each_tile
from kvboost.kernels.triton.experts_kernels import sort_kernel

pytestmark = interpreted

FEW = ExpertsTile(0, ProductTile(4, 32, 4, 2), ProductTile(2, 32, 4, 2))
TILED = ExpertsTile(16, ProductTile(32, 32, 4, 2), ProductTile(16, 16, 4, 2))

FORMS = pytest.mark.parametrize("tile", [FEW, TILED, None], ids=["pairs", "tiles", "chosen"])

CASES = (
    Mixture(1, 1, 4, 32, 16),
    Mixture(1, 3, 5, 40, 24),
    Mixture(5, 2, 8, 64, 33, "one"),
    Mixture(7, 4, 16, 50, 20, "uneven"),
    Mixture(3, 4, 4, 32, 48, activation="gelu_tanh"),
    Mixture(2, 1, 3, 17, 9, activation="gelu"),
)


@FORMS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_its_definition(case: Mixture, tile: ExpertsTile | None) -> None:
    inputs = build(case, torch.float32)
    close(routed_experts(**inputs, tile=tile), expected(**inputs))


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_transformers_rounds(dtype: torch.dtype, tile: ExpertsTile | None) -> None:
    """With router weights in the dtype and in float32; nearly all elements are the same bits."""
    inputs = build(Mixture(5, 2, 6, 64, 16, "uneven"), dtype)
    for weights in (inputs["weights"], inputs["weights"].float() * 1.001):
        inputs["weights"] = weights
        out, own = routed_experts(**inputs, tile=tile), transformers_own(**inputs)
        close(out, own.double())
        assert (out == own).double().mean() > 0.9


def transformers_own(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    module = Qwen3MoeExperts(
        Qwen3MoeConfig(num_experts=len(down), hidden_size=x.shape[1], moe_intermediate_size=down.shape[2])
    )
    module.config._experts_implementation = "batched_mm"
    module.gate_up_proj, module.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
    with torch.no_grad():
        out: Tensor = module(x, index, weights)
    return out


@pytest.mark.parametrize("experts", [1, 7, 50])
def test_every_pair_is_in_one_tile_of_its_expert(experts: int) -> None:
    """And every slot is written: tiles cover the sorted pairs without a gap, whoever gets how many."""
    for pairs, rows in ((1, 16), (40, 16), (100, 32)):
        for chosen in (
            torch.randint(0, experts, (pairs,)),
            torch.full((pairs,), experts - 1),
            torch.arange(pairs) % experts,
        ):
            order = torch.full((pairs,), -1, dtype=torch.int32)
            tiles = torch.full((min(pairs, experts) + pairs // rows, 3), -1, dtype=torch.int32)
            sort_kernel[(experts,)](chosen, order, tiles, pairs, TILE_ROWS=rows, BLOCK=64, EARLY=False)
            assert order.tolist() == chosen.sort(stable=True).indices.tolist()
            covered = []
            for expert, first, last in tiles.tolist():
                assert 0 <= first <= last <= min(pairs, first + rows)
                assert all(chosen[order[place]] == expert for place in range(first, last))
                covered += range(first, last)
            assert covered == list(range(pairs))


def test_a_number_that_overflowed_stays_with_its_token() -> None:
    inputs = build(Mixture(6, 2, 3, 32, 16), torch.float32)
    inputs["x"][2, 5] = torch.nan
    for tile in (FEW, TILED):
        out = routed_experts(**inputs, tile=tile)
        assert out[2].isnan().all() and out[[0, 1, 3, 4, 5]].isfinite().all()


@FORMS
def test_a_residual_is_added_to_what_was_rounded(tile: ExpertsTile | None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        inputs = build(Mixture(3, 4, 5, 40, 16), dtype)
        residual = torch.randn_like(inputs["x"])
        before = residual.clone()
        out = routed_experts(**inputs, residual=residual, tile=tile)
        assert torch.equal(out, residual + routed_experts(**inputs, tile=tile))
        assert torch.equal(residual, before)


def test_inputs_may_be_parts_of_others() -> None:
    inputs = build(Mixture(4, 2, 3, 32, 16), torch.float32)
    reference = expected(**inputs)
    wide = torch.full((4, 50), torch.nan)
    wide[:, 9:41] = inputs["x"]
    inputs |= {
        "x": wide[:, 9:41],
        "index": inputs["index"].T.contiguous().T,
        "weights": inputs["weights"].T.contiguous().T,
    }
    for tile in (FEW, TILED):
        close(routed_experts(**inputs, tile=tile), reference)


def test_tiles_follow_the_number_of_pairs() -> None:
    sizes = tokens_of_each_tile(8, 128)
    assert sizes[-1] == 1 and len(sizes) == len(
        {chosen_tile(t, 8, 128) for t in range(1, 3000, 7)} | {chosen_tile(1, 8, 128)}
    )
    assert [chosen_tile(t, 8, 128).pairs for t in (1, 16, 256, 1024, 1025)] == [0, 16, 32, 64, 128]


def test_what_does_not_fit_is_refused() -> None:
    inputs = build(Mixture(3, 2, 4, 32, 16), torch.float32)
    assert routed_experts(**{**inputs, **{k: inputs[k][:0] for k in ("x", "index", "weights")}}).shape == (0, 32)
    for changes, message in (
        ({"activation": "relu"}, "not one of"),
        ({"x": inputs["x"].half()}, "in torch.float16"),
        ({"x": inputs["x"][:2]}, r"x \(2, 32\), index \(3, 2\)"),
        ({"weights": inputs["weights"][:, :1]}, r"weights \(3, 1\)"),
        ({"index": inputs["index"].float()}, "must hold integers"),
        ({"residual": inputs["x"][:2]}, "like x"),
        ({"down": inputs["down"][:3]}, r"must be \[E, 2I, 32\]"),
        ({"gate_up": inputs["gate_up"].transpose(1, 2).contiguous().transpose(1, 2)}, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            routed_experts(**{**inputs, **changes})
