"""Rotary tables in Triton, interpreted on a CPU, against the modules of Transformers, and where they are put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triton_rig import ROTARY_TYPES, interpreted

pytest.importorskip("triton")

from kvboost.attention.interface import attach
from kvboost.attention.step import running
from kvboost.kernels.triton.rotary_tables import rotary_tables
from kvboost.models.fused import proof
from kvboost.models.fused.fuse import fuse
from kvboost.models.fused.gpu import GpuOps
from kvboost.models.fused.proof import Fused
from kvboost.models.fused.reference import ReferenceStep

pytestmark = interpreted

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
PLACES = 2
"""Units in the last place between NumPy's cosine and torch's: each is right to about one."""


@pytest.fixture(autouse=True)
def another_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "TABLES_APART", PLACES * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("kind", ROTARY_TYPES)
def test_tables_are_those_of_transformers(kind: str, head_dim: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(**{**SIZES, "head_dim": head_dim, "rope_parameters": ROTARY_TYPES[kind]})
    module = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 3, 77, 4095, 32_768, 131_071, 105_616, 1_000_003])
    own = module(torch.zeros(1, dtype=dtype), positions[None])
    ours = rotary_tables(positions, module.inv_freq, module.attention_scaling, dtype)
    allowed = PLACES * torch.finfo(dtype).eps * max(1.0, module.attention_scaling)
    for a, b in zip(own, ours, strict=True):
        assert b.dtype == dtype and b.shape == a[0].shape
        assert float((a[0].float() - b.float()).abs().max()) <= allowed


def test_one_token_and_none() -> None:
    frequencies = torch.tensor([1.0, 0.25, 0.125])
    for positions in (torch.tensor([9]), torch.tensor([], dtype=torch.long), torch.tensor([9], dtype=torch.int32)):
        cos, sin = rotary_tables(positions, frequencies, 0.5, torch.float32)
        angle = (positions[:, None] * frequencies).repeat(1, 2)
        assert torch.allclose(cos, angle.cos() * 0.5) and torch.allclose(sin, angle.sin() * 0.5)
    with pytest.raises(ValueError, match="contiguous"):
        rotary_tables(torch.zeros(1, 4, dtype=torch.long), frequencies, 1.0, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        rotary_tables(torch.zeros(4, dtype=torch.long)[::2], frequencies, 1.0, torch.float32)


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    assert attach(model)
    return model


def rotary_of(model: PreTrainedModel) -> Any:
    return model.model.rotary_emb


@pytest.mark.parametrize("kind", ROTARY_TYPES)
def test_put_in_for_frequencies_that_stay(kind: str) -> None:
    model = llama(rope_parameters=ROTARY_TYPES[kind])
    assert fuse(model, GpuOps(), 256)["rotary"] == 1
    assert isinstance(vars(rotary_of(model))["forward"], Fused)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda p: p["rope_type"],
)  # fmt: skip
def test_left_alone_where_frequencies_change(parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their name, and where the name is not known by the proof: far positions show it."""
    assert fuse(llama(rope_parameters=parameters), GpuOps(), 1024)["rotary"] == 0
    monkeypatch.setattr("kvboost.models.fused.parts.STEADY_ROTARY", (parameters["rope_type"],))
    assert fuse(llama(rope_parameters=parameters), GpuOps(), 1024)["rotary"] == 0


def test_both_kinds_of_layers_of_gemma3() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2}, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    assert attach(model)
    assert fuse(model, GpuOps(), 256)["rotary"] == 1
    module = rotary_of(model)
    x, positions = torch.zeros(1, 3, 32), torch.tensor([[5, 90, 200]])
    tables = []
    for layer_type in config.layer_types:
        own = Gemma3RotaryEmbedding.forward(module, x, positions, layer_type)
        with running(ReferenceStep(packed=True)):
            tables.append(module(x, positions, layer_type))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, tables[-1], strict=True))
    assert not torch.allclose(tables[0][0], tables[1][0])


class ColdRotaryEmbedding(LlamaRotaryEmbedding):
    """Looks like one that is known, and is not."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return cos, sin * (1 + 1e-6)


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    model = llama()
    model.model.rotary_emb = ColdRotaryEmbedding(model.config)
    assert fuse(model, GpuOps(), 256)["rotary"] == 0


def test_new_frequencies_are_used() -> None:
    model = llama()
    assert fuse(model, GpuOps(), 256)["rotary"] == 1
    module = rotary_of(model)
    x, positions = torch.zeros(1, 1, 32), torch.tensor([[7]])
    module.inv_freq = nn.Buffer(module.inv_freq * 3, persistent=False)
    with running(ReferenceStep(packed=True)):
        cos, _ = module(x, positions)
    assert torch.equal(cos, LlamaRotaryEmbedding.forward(module, x, positions)[0])
