"""Fused modules: put in where they are proved equal, never elsewhere, and gone when their reason is."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from boost_models import llama
from kvboost import KVBoost, boost, unboost
from kvboost.attention.interface import attach
from kvboost.kernels.native.library import unavailable
from kvboost.models.fused.cpu import CpuOps
from kvboost.models.fused.fuse import fuse, unfuse
from kvboost.models.fused.proof import Fused

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config, "phi3": Phi3Config, "gemma2": Gemma2Config,
               "cohere": CohereConfig, "olmo": OlmoConfig, "olmo2": Olmo2Config}  # fmt: skip
    classes = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM, "phi3": Phi3ForCausalLM,
               "gemma2": Gemma2ForCausalLM, "cohere": CohereForCausalLM, "olmo": OlmoForCausalLM,
               "olmo2": Olmo2ForCausalLM}  # fmt: skip
    model = classes[kind](configs[kind](**{**SIZES, **changes})).eval()
    assert attach(model)
    return model


def counts(kind: str, **changes: Any) -> dict[str, int]:
    return fuse(model_of(kind, **changes), CpuOps(), 256)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_whole_layers_of_the_common_shape_are_fused(kind: str) -> None:
    found = counts(kind)
    assert (found["layers"], found["attention"], found["mlp"]) == (2, 2, 2)
    assert found["linears"] == 1, "the head"


def test_layers_with_more_norms_are_fused_in_parts() -> None:
    found = counts("gemma2")
    assert found == {
        "layers": 0,
        "attention": 2,
        "mlp": 2,
        "experts": 0,
        "routers": 0,
        "mixtures": 0,
        "norms": 9,
        "linears": 1,
        "rotary": 0,
    }
    found = counts("olmo2")
    assert (found["layers"], found["attention"], found["mlp"]) == (0, 2, 2)


def test_a_rotation_of_another_layout_is_left_alone() -> None:
    """Cohere rotates neighbouring pairs: its attention looks like Llama's and is not."""
    found = counts("cohere")
    assert (found["layers"], found["attention"], found["mlp"]) == (0, 0, 2)


def test_clipping_that_small_inputs_never_reach_is_noticed() -> None:
    assert counts("olmo")["attention"] == 2
    assert counts("olmo", clip_qkv=8.0)["attention"] == 0


def test_one_copy_of_the_weights_is_kept() -> None:
    model = model_of("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    fuse(model, CpuOps(), 256)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())


def test_outside_a_step_the_modules_own_code_runs() -> None:
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(ids).logits
        fuse(model, CpuOps(), 256)
        assert torch.equal(model(ids).logits, before)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def tiny(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return llama().eval()


def answer(kv: KVBoost) -> list[int]:
    return kv.generate([5, 6, 7, 8], max_new_tokens=12, temperature=0, ignore_eos=True).token_ids


def own_answer(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([[5, 6, 7, 8]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    return out[0, 4:].tolist()


@pytest.mark.parametrize("change", ["in place", "new data", "new parameter", "new module"])
def test_changed_weights_are_used(change: str) -> None:
    model = tiny(0)
    kv = KVBoost.from_model(model, num_blocks=32)
    try:
        answer(kv)
        other = tiny(1).model.layers[1].self_attn.k_proj
        linear = model.model.layers[1].self_attn.k_proj
        with torch.no_grad():
            if change == "in place":
                linear.weight.copy_(other.weight)
            elif change == "new data":
                linear.weight.data = other.weight.data.clone()
            elif change == "new parameter":
                linear.weight = nn.Parameter(other.weight.detach().clone())
            else:
                model.model.layers[1].self_attn.k_proj = other
        kv.reset_cache()
        assert answer(kv) == own_answer(model)
    finally:
        kv.close()


def test_copies_have_their_classes_own_forward() -> None:
    model = boost(tiny(0), num_blocks=32)
    ids = torch.tensor([[5, 6, 7]])
    try:
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert any(isinstance(vars(m).get("forward"), Fused) for m in model.modules())
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            for twin in twins:
                assert not any(isinstance(vars(m).get("forward"), Fused) for m in twin.modules())
                assert twin(ids).logits.abs().max() > 0, "it does not run on the original's weights"
    finally:
        unboost(model)


def test_unboost_leaves_nothing_behind() -> None:
    model = unboost(boost(tiny(0), num_blocks=32))
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_fused_model_is_freed_with_its_last_reference() -> None:
    model = model_of("llama")
    fuse(model, CpuOps(), 256)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_hooked_and_replaced_modules_are_left_alone() -> None:
    model = model_of("llama")
    calls = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    own = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: own(x)
    found = fuse(model, CpuOps(), 256)
    assert (found["layers"], found["attention"], found["mlp"]) == (0, 1, 1)
    unfuse(model)
    assert "forward" in vars(model.model.layers[1].mlp)


def test_a_fused_model_can_be_saved_and_loaded(tmp_path: Any) -> None:
    model = boost(tiny(0), num_blocks=32)
    try:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        for (name, own), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(own, theirs), name
        size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        assert size < 1.2 * sum(p.nbytes for p in model.parameters()), "no view is written with the whole it views"
    finally:
        unboost(model)
