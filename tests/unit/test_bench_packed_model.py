"""Models with random 4-bit weights for benches: what is packed, what is not, and that they compute."""

from __future__ import annotations

import pytest
import torch

from kvboost import KVBoost
from kvboost.bench.packed_model import GROUP, packed_model
from kvboost.weights.modules import PackedLinear
from kvboost.weights.packing import Scheme
from kvboost.weights.replace import unfilled


def test_layers_are_packed_and_the_rest_is_not() -> None:
    model = packed_model("tiny", device="cpu", dtype=torch.float32)
    packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(packed) == 2 * 7 and all(".layers." in name for name in packed)
    assert {(m.packing.scheme, m.packing.bits, m.packing.group) for m in packed.values()} == {(Scheme.ZEROS, 4, GROUP)}
    assert model.lm_head.weight.dtype is torch.float32 and not any(p.is_meta for p in model.parameters())
    weight = packed["model.layers.0.mlp.down_proj"]
    dense = weight.packing.dense(weight.weight)
    assert abs(dense.mean()) < dense.std() / 20, "a mean would grow from layer to layer"


def test_it_answers() -> None:
    torch.manual_seed(0)
    model = packed_model("tiny", device="cpu", dtype=torch.float32)
    ids = torch.arange(3, 40).unsqueeze(0)
    logits = model(ids).logits
    assert torch.isfinite(logits).all() and logits.std() > 0
    with KVBoost.from_model(model, max_model_len=256) as kv:
        [result] = kv.generate([ids[0].tolist()], max_new_tokens=1, temperature=0, ignore_eos=True)
    assert result.token_ids == [int(logits[0, -1].argmax())]


@pytest.mark.parametrize(("shape", "gib"), [("qwen2.5-32b", 18.5), ("qwen2.5-7b", 5.2)])
def test_sizes_of_real_shapes(shape: str, gib: float) -> None:
    """4 bits for the layers, 16 for embedding and head; nothing is made."""
    model = packed_model(shape, unfilled, "cpu")
    assert sum(p.nbytes for p in model.parameters()) / 2**30 == pytest.approx(gib, abs=0.7)
