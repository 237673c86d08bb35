"""The GPU's runner and fused modules in Triton's interpreter: Transformers' tokens from static inputs and padded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost import KVBoost, SamplingParams
from kvboost.api import build
from kvboost.attention.backends import Backend
from kvboost.engine.gpu_runner import GpuRunner
from kvboost.errors import KVBoostError
from kvboost.models.fused import gpu, proof

pytestmark = interpreted

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "choose", lambda *_: Backend("triton", "interpreted", None))
    monkeypatch.setattr(proof, "TABLES_APART", 2 * torch.finfo(torch.float32).eps)


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)).eval()
    if kind == "qwen3_moe":
        sizes = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, head_dim=16)).eval()
    if kind == "mixtral":
        sizes = {**SIZES, "intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 4}
        return MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.mark.parametrize(("kind", "least_saved"), [("llama", 1), ("qwen3", 10**9)])
def test_tokens_equal_those_of_transformers(kind: str, least_saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention shared among the three prompts that begin alike, and without."""
    monkeypatch.setattr("kvboost.attention.sharing.LEAST_SAVED_TOKENS", least_saved)
    model = model_of(kind)
    shared = [(7 * i) % 120 + 3 for i in range(37)]
    prompts = [shared + [5 + i] * (i + 1) for i in range(3)] + [[9]]
    expected = []
    for p in prompts:
        ids = torch.tensor([p])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        expected.append(out[0, len(p) :].tolist())
    with KVBoost.from_model(model, num_blocks=32, max_num_batched_tokens=24) as kv:
        assert isinstance(kv.built.runner, GpuRunner)
        assert (kv.built.fused["layers"], kv.built.fused["rotary"]) == (1, 1)
        for _ in range(2):  # cold in chunks, then warm
            results = kv.generate(prompts, max_new_tokens=4, temperature=0)
            assert [r.token_ids for r in results] == expected
        assert results[0].usage.cached_tokens >= 32
        kv.engine.check()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_mixtures_of_experts_give_the_tokens_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "tokens_of_each_tile", lambda *_: (1, 17))  # the interpreter is slow
    model = model_of(kind)
    prompts = [[(7 * i + j) % 120 + 3 for j in range(21)] for i in range(2)] + [[9]]
    expected = []
    for p in prompts:
        ids = torch.tensor([p])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        expected.append(out[0, len(p) :].tolist())
    with KVBoost.from_model(model, num_blocks=32, max_num_batched_tokens=24) as kv:
        assert {kv.built.fused[kind] for kind in ("experts", "routers", "mixtures", "layers")} == {1}
        assert [r.token_ids for r in kv.generate(prompts, max_new_tokens=4, temperature=0)] == expected
        assert kv.generate(prompts[0], max_new_tokens=4, temperature=0).token_ids == expected[0]


def test_prompt_logprobs_and_sampling_take_the_same_path() -> None:
    model = model_of("llama")
    with KVBoost.from_model(model, num_blocks=32) as kv:
        result = kv.generate([5, 6, 7, 8], max_new_tokens=3, temperature=0.8, seed=1, logprobs=2, prompt_logprobs=1)
        with torch.no_grad():
            own = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
        found = result.prompt_logprobs
        assert found is not None and found[1] is not None
        assert found[1][6].logprob == pytest.approx(float(own[0, 6]), abs=1e-4)
        again = kv.generate([5, 6, 7, 8], max_new_tokens=3, temperature=0.8, seed=1)
        assert again.token_ids == result.token_ids


def test_steps_begun_ahead_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end by a stop token, by length, and by an abort, while the next step is under way."""
    model = model_of("llama")
    prompts = [[(3 * i + j) % 120 + 3 for j in range(i + 3)] for i in range(3)]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    with KVBoost.from_model(model, num_blocks=32) as kv:
        plain = [kv.generate(p, **options).token_ids for p in prompts]
        ahead = kv.built.runner
        begun = []
        run = ahead.run
        monkeypatch.setattr(ahead, "run", lambda plan, follows=None: (begun.append(follows), run(plan, follows))[1])
        kv.reset_cache()
        stops = [plain[i][2 * i + 3] for i in range(3)]
        sampling = [
            SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[s] if i % 2 else [], ignore_eos=True)
            for i, s in enumerate(stops)
        ]
        results = kv.generate(prompts, sampling=sampling)
        for i, result in enumerate(results):
            end = plain[i].index(stops[i]) + 1 if i % 2 else 12
            assert result.token_ids == plain[i][:end], i
        assert sum(follows is not None for follows in begun) > 6
        stream = kv.stream(prompts[0], **options)
        next(iter(stream))
        stream.close()
        assert [r.token_ids for r in kv.generate(prompts, **options)] == plain
        kv.engine.check()
        assert kv.stats().num_running == 0


def test_prompts_are_begun_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces, and those that wait for a place, beside sequences whose tokens the host does not know yet."""
    model = model_of("llama")
    prompts = [[(7 * i + j) % 120 + 3 for j in range(5 + 12 * i)] for i in range(4)]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    with KVBoost.from_model(model, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=16) as kv:
        plain = [kv.generate(p, **options).token_ids for p in prompts]
        kv.reset_cache()
        run, begun = kv.built.runner.run, []
        monkeypatch.setattr(
            kv.built.runner, "run", lambda plan, follows=None: (begun.append((plan, follows)), run(plan, follows))[1]
        )
        assert [r.token_ids for r in kv.generate(prompts, **options)] == plain
        kv.engine.check()
    mixed = [
        plan for plan, follows in begun
        if follows is not None and {w.count > 1 for w in plan.work} == {False, True}
    ]  # fmt: skip
    assert len(mixed) > 1
    assert sum(follows is None for _, follows in begun) < 4


def test_transformers_does_not_look_for_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the positions, and outside of a capture wait for the device."""
    with KVBoost.from_model(model_of("llama"), num_blocks=32) as kv:

        def find(*_: Any) -> None:
            raise AssertionError("the positions are read")

        monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", find)
        results = kv.generate([[5, 6, 7], [8, 9]], max_new_tokens=3, temperature=0)
        assert [len(r.token_ids) for r in results] == [3, 3]


def test_logits_that_overflow_fail_their_request() -> None:
    model = model_of("llama")
    with KVBoost.from_model(model, num_blocks=32) as kv:
        with torch.no_grad():
            model.lm_head.weight[40, 0] = torch.nan
        with pytest.raises(KVBoostError, match="logits are nan"):
            kv.generate([5, 6, 7], max_new_tokens=3, temperature=0)
        with torch.no_grad():
            model.lm_head.weight[40, 0] = 0.0
        assert len(kv.generate([5, 6, 7], max_new_tokens=3, temperature=0).token_ids) == 3
