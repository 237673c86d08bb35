"""Fused mixtures of experts: only where they are proved equal, and the module's own code where that is better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV4Config,
    GptOssConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.attention.interface import attach
from kvboost.attention.step import running
from kvboost.models.fused import gpu
from kvboost.models.fused.cpu import CpuOps
from kvboost.models.fused.experts import Experts, Router
from kvboost.models.fused.fuse import fuse
from kvboost.models.fused.gpu import GpuMixtures, GpuOps
from kvboost.models.fused.parts import Held
from kvboost.models.fused.proof import Call
from kvboost.models.fused.reference import ReferenceStep

pytestmark = interpreted

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "num_experts": 5, "num_experts_per_tok": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one and of 17 tokens: the interpreter is slow."""
    monkeypatch.setattr(gpu, "tokens_of_each_tile", lambda *_: (1, 17))


def model_of(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, "head_dim": 16, **changes})).eval()
    assert attach(model)
    return model


def counts(model: PreTrainedModel, ops: Any = None) -> tuple[int, ...]:
    found = fuse(model, ops or GpuOps(), 64)
    return tuple(found[kind] for kind in ("experts", "routers", "mixtures", "layers"))


def experts_of(**config: Any) -> Qwen3MoeExperts:
    module = Qwen3MoeExperts(Qwen3MoeConfig(**{**SIZES, **config}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return module


def read(module: torch.nn.Module) -> Experts | None:
    return Experts.read(module, Held(), GpuMixtures())


def test_layers_are_fused_whole_and_left_alone_on_a_cpu() -> None:
    model = model_of(norm_topk_prob=True)
    assert counts(model) == (1, 1, 1, 1)
    assert counts(model, CpuOps()) == (0, 0, 0, 0)


def test_a_shared_expert_leaves_the_block_to_its_own_code() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "shared_expert_intermediate_size": 16, "intermediate_size": 16}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes)).eval()
    assert attach(model)
    assert counts(model) == (1, 1, 0, 0)


def test_experts_and_routers_that_compute_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, router = Qwen3MoeExperts.forward, Qwen3MoeTopKRouter.forward

    def scaled(self: Any, *args: Any) -> Tensor:
        return experts(self, *args) * 1.01

    def sharpened(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = router(self, x)
        return logits, weights.square(), index

    monkeypatch.setattr(Qwen3MoeExperts, "forward", scaled)
    assert counts(model_of()) == (0, 1, 0, 0)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", experts)
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", sharpened)
    assert counts(model_of()) == (1, 0, 0, 0)


def test_a_form_that_is_wrong_for_some_number_of_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own calls are of ten tokens; trials are of others."""
    right = gpu.routed_experts
    monkeypatch.setattr(gpu, "routed_experts", lambda x, *rest: right(x, *rest) * (1.01 if len(x) == 17 else 1.0))
    assert counts(model_of()) == (0, 1, 0, 0)


def test_calls_with_other_arguments_are_not_taken_for_ours() -> None:
    names = ("hidden_states", "top_k_index", "top_k_weights")
    assert Call((1, 2, 3), {}).gives(*names) and Call((1,), {"top_k_weights": 3, "top_k_index": 2}).gives(*names)
    for other in (Call((1, 2), {}), Call((1, 2, 3, 4), {}), Call((1, 2), {"weights": 3}), Call((1, 2, 3), {"bias": 4})):
        assert not other.gives(*names)


def test_other_experts_are_left_alone_by_structure() -> None:
    assert read(experts_of()) is not None
    assert read(experts_of(hidden_act="relu")) is not None, "found out by trying: the kernel refuses it"
    gpt_oss = GptOssConfig(hidden_size=16, intermediate_size=16, num_local_experts=2)
    assert read(GptOssExperts(gpt_oss)) is None
    clipped = DeepseekV4Experts(DeepseekV4Config(hidden_size=16, moe_intermediate_size=16, n_routed_experts=2))
    assert set(clipped._parameters) == {"gate_up_proj", "down_proj"} and read(clipped) is None
    for name, value in (("_is_expert_parallel", True), ("is_transposed", True), ("has_bias", True)):
        module = experts_of()
        setattr(module, name, value)
        assert read(module) is None, name
    hooked = experts_of()
    hooked.register_forward_hook(lambda *_: None)
    assert read(hooked) is None
    strided = experts_of()
    strided.down_proj = torch.nn.Parameter(strided.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2))
    assert read(strided) is None
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES))
    assert Router.read(router, Held(), GpuMixtures()) is not None
    router.register_buffer("e_score_correction_bias", torch.zeros(5))
    assert Router.read(router, Held(), GpuMixtures()) is None


def test_replaced_weights_take_the_modules_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    assert counts(model) == (1, 1, 1, 1)
    layer: Any = model.model.layers[0]
    calls = []
    own = Qwen3MoeExperts.forward
    monkeypatch.setattr(
        layer.mlp.experts.forward, "_own", lambda self, *args: (calls.append(len(args[0])), own(self, *args))[1]
    )

    def logits(tokens: int) -> Tensor:
        ids = torch.arange(3, 3 + tokens)[None]
        with torch.no_grad(), running(ReferenceStep(packed=True)):
            out: Tensor = model(input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False).logits
        with torch.no_grad():
            torch.testing.assert_close(out, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
        return out

    logits(5)
    assert calls == [5], "outside of a step alone"
    with torch.no_grad():
        layer.mlp.experts.down_proj.data = layer.mlp.experts.down_proj.data * 2
    logits(4)
    assert calls == [5, 4, 4]
