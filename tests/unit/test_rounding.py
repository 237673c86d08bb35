"""Round-to-nearest at load: any family, the same from files as in place, and what the module computes is what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, MixtralConfig

import packed_checkpoints as made
from kvboost.errors import ConfigError, ModelLoadError
from kvboost.models.loading import load_model, locate
from kvboost.weights.modules import PackedEmbedding, PackedLinear
from kvboost.weights.rounding import packing_of, round_model, rounded

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]


def build(name: str) -> Any:
    configs = {
        "gemma3": lambda: Gemma3TextConfig(
            **{**made.SHAPE, "head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
            query_pre_attn_scalar=16, pad_token_id=0,
        ),
        "gpt2": lambda: GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
        "mixtral": lambda: MixtralConfig(**made.SHAPE, num_local_experts=2, num_experts_per_tok=1),
    }  # fmt: skip
    if name in configs:
        return AutoModelForCausalLM.from_config(configs[name]()).eval()
    return made.tiny(name.split("-")[0], tie_word_embeddings=name.endswith("tied"))


NAMES = ("llama", "llama-tied", "qwen2", "gemma3", "gpt2", "mixtral")


def packed_modules(model: torch.nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear | PackedEmbedding)}


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_rounded_weights(name: str, kind: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    rounded_one = load_model(locate(tmp_path), "float32", CPU, kind)
    packed = packed_modules(rounded_one)
    assert packed
    for path, module in packed.items():
        old = model.get_submodule(path)
        dense = module.packing.dense(module.weight)
        weight = old.weight.T if type(old).__name__ == "Conv1D" else old.weight
        levels = 127 if module.packing.bits == 8 else 15
        groups = weight.detach().view(weight.shape[0], -1, module.packing.group)
        spread = groups.abs().amax(-1) if levels == 127 else groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
        step = float(
            ((dense - weight.detach()).view_as(groups).abs() / (spread / levels).clamp_min(1e-12).unsqueeze(-1)).max()
        )
        # Half a step; with zeros the ends of the range can be another half outside, and fp16 scales are rounded.
        assert step <= (0.5 if levels == 127 else 1.0) * 1.01
        with torch.no_grad():
            old.weight.copy_(dense.T if type(old).__name__ == "Conv1D" else dense)
    with torch.no_grad():
        torch.testing.assert_close(rounded_one(IDS).logits, model(IDS).logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt2"])
def test_in_place_and_from_files_are_the_same(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(locate(tmp_path), "float32", CPU, "int4")
    in_place = round_model(model, "int4")
    ours, theirs = dict(loaded.named_parameters()), dict(in_place.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_tied_head_shares_its_int8_bytes_with_the_embedding(tmp_path: Path) -> None:
    build("llama-tied").save_pretrained(tmp_path)
    model = load_model(locate(tmp_path), "bfloat16", CPU, "int4")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.packing.bits == 8 and model.model.layers[0].mlp.up_proj.packing.bits == 4
    assert model.dtype == torch.bfloat16 == model(IDS).logits.dtype


def test_inputs_that_are_no_multiple_of_32_stay_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.tiny(intermediate_size=80).save_pretrained(tmp_path)
    model = load_model(locate(tmp_path), "float32", CPU, "int4")
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    assert "2 linears stay dense" in caplog.text


@pytest.mark.parametrize(("k", "group"), [(128, 128), (576, 64), (96, 32), (1536, 128), (33, None)])
def test_the_largest_group_that_divides(k: int, group: int | None) -> None:
    packing = packing_of("int4", k)
    assert (packing and packing.group) == group


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_hard_rows(kind: str) -> None:
    """Zeros, one huge value, all positive, all negative, tiny, and a range that fp16 scales cannot hold."""
    k = 64
    weight = torch.stack([
        torch.zeros(k), torch.cat([torch.tensor([1e4]), torch.full((k - 1,), 1e-3)]), torch.linspace(5, 6, k),
        -torch.linspace(5, 6, k), torch.linspace(-1e-9, 1e-9, k),
    ])  # fmt: skip
    packing = packing_of(kind, k)
    assert packing is not None
    dense = packing.dense(rounded("w", lambda a, b: weight[a:b], packing).rows(0, 5))
    assert torch.isfinite(dense).all() and not dense[0].any()
    levels = 127 if kind == "int8" else 15
    largest = weight.abs().amax(1, keepdim=True)
    assert ((dense - weight).abs() <= largest / levels * 1.01 + 1e-8).all()
    if kind == "int4":
        with pytest.raises(ModelLoadError, match=r"w has weights too large"):
            rounded("w", lambda a, b: weight[a:b] * 1e3, packing).rows(1, 2)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    model = made.tiny()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight.*finite"):
        load_model(locate(tmp_path), "float32", CPU, "int8")


def test_the_engine_serves_rounded_weights(tmp_path: Path) -> None:
    from kvboost import KVBoost

    made.tiny().save_pretrained(tmp_path)
    reference = load_model(locate(tmp_path), "float32", CPU, "int4")
    ids = reference.generate(torch.arange(5, 40)[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    with KVBoost.from_pretrained(str(tmp_path), dtype="float32", num_blocks=64, weights="int4") as llm:
        got = llm.generate(list(range(5, 40)), max_new_tokens=8, do_sample=False).token_ids
        llm.check()
    assert list(got) == ids[0, 35:].tolist()


def test_the_option_is_checked() -> None:
    from kvboost import EngineConfig

    with pytest.raises(ConfigError, match="weights"):
        EngineConfig(weights="int3")
