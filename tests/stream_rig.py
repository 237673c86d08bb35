"""Tiny models of several layers, and the budgets that keep a given number of them resident."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.weights import streaming
from kvboost.weights.flat import FlatLayout, owned_by_layer

LAYERS = 7

SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "bloom": ("Bloom", {}),
}
"""Whole layers fused, only parts of them (Gemma 2), nothing (Mixtral's experts), and the compatibility path (BLOOM)."""

PROMPTS = [[5 + (7 * i * j) % 150 for j in range(1, 5 + 11 * i)] for i in range(1, 9)]
"""Eight prompts of 15 to 92 tokens."""

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}

OPTIONS: dict[str, Any] = {"num_blocks": 128, "max_num_batched_tokens": 64}
"""Prompts are prefilled in pieces, beside decoding sequences."""


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> PreTrainedModel:
    """Random weights whose greedy answers vary; the same for the same seed."""
    name, changes = FAMILIES[family]
    shape = dict(SHAPE)
    if name == "Bloom":
        shape = {"vocab_size": 160, "hidden_size": 64, "n_layer": LAYERS, "n_head": 4, "pad_token_id": 0}
        shape |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**shape, **changes)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.6 / math.sqrt(parameter.shape[-1]))
    return model.to(dtype)


def budget_gib(model: PreTrainedModel, resident: int, slots: int = 2) -> float:
    """What `model` needs to keep that many layers."""
    layers = streaming.decoder_layers(model, model.config.num_hidden_layers)
    assert layers is not None
    by_layer, rest = owned_by_layer(model, layers)
    size = max(FlatLayout.of(owned).nbytes for owned in by_layer)
    return (FlatLayout.of(rest).nbytes + (resident + slots) * size) / 2**30


def answers(kv: KVBoost, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    return [r.token_ids for r in kv.generate(prompts, **{**GREEDY, **options})]


@contextmanager
def streamed(family: str, resident: int, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[KVBoost]:
    """An engine around a streamed tiny model; its invariants are checked at the end."""
    model = tiny(family, dtype)
    budget = budget_gib(model, resident)
    with KVBoost.from_model(model, weights_budget_gib=budget, **{**OPTIONS, **options}) as kv:
        weights = kv.stats().weights
        assert weights is not None and (weights.layers_resident, weights.layers_streamed) == (
            resident,
            LAYERS - resident,
        )
        yield kv
        kv.check()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Layer files of a test lie in its own directory, and measuring a drive writes little."""
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kvboost.weights.disk.PROBE_BYTES", 1 << 20)
    return tmp_path / "cache" / "kvboost" / "layers"


@pytest.fixture(autouse=True)
def native_kernels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels are kept in the same cache directory: loaded before that moves, they are not compiled again."""
    from kvboost.kernels.native.library import unavailable

    unavailable()


@pytest.fixture(params=["disk", "RAM"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where streamed layers wait. On a CPU they are only streamed from disk; the copies from RAM are a GPU's path."""
    if request.param == "RAM":
        original = streaming.budget_of

        def with_host(config: EngineConfig, *args: Any) -> Any:
            return dataclasses.replace(original(config, *args), host_bytes=1 << 40)

        monkeypatch.setattr(streaming, "budget_of", with_host)
        monkeypatch.setattr("kvboost.weights.store.PROBE_BYTES", 1 << 20)
    return str(request.param)
