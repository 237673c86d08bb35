"""The engine on a GPU: the torch attention gives Transformers' tokens there too. Skipped without CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost import KVBoost, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": None,
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gemma2":
        config = Gemma2Config(**{**SHAPE, "initializer_range": 0.05}, head_dim=16, sliding_window=24)
        return Gemma2ForCausalLM(config).eval().cuda()
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().cuda()


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_equal_those_of_transformers(name: str) -> None:
    model = build(name)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 320, (count,), generator=generator).tolist()

    shared = ids(70)
    prompts = [shared + ids(k) for k in (1, 9, 40, 130)] + [ids(1), ids(17)]
    expected = [
        reference.generate(torch.tensor([p], device="cuda"), max_new_tokens=24, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    options = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    with KVBoost.from_model(model, num_blocks=128, max_num_batched_tokens=64) as kv:
        assert kv.built.fused["rotary"] == 1, "cos and sin are not the bits of Transformers' module"
        assert [r.token_ids for r in kv.generate(prompts, **options)] == expected
        again = kv.generate(prompts, **options)
        assert [r.token_ids for r in again] == expected
        assert again[0].usage.cached_tokens == 70
        kv.check()
    with KVBoost.from_model(model, num_blocks=12, max_num_batched_tokens=64) as kv:
        assert [r.token_ids for r in kv.generate(prompts[:3], **options)] == expected[:3]
        assert kv.stats().num_preemptions > 0


def test_the_pool_takes_what_is_left_of_the_gpu() -> None:
    with KVBoost.from_model(build("llama"), gpu_memory_utilization=0.1) as kv:
        _, total = torch.cuda.mem_get_info()
        pool_bytes = kv.built.layout.slab_bytes * kv.stats().blocks_total
        assert 0.01 * total < pool_bytes < 0.1 * total


def test_a_long_prompt_in_pieces_equals_one_piece() -> None:
    """Later pieces gather their keys for torch's attention; steps begun ahead and graphs serve the answer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "max_position_embeddings": 8192})).eval().cuda()
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(3, 320, (5000,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([prompt], device="cuda")
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)[0, 5000:].tolist()
    options = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    for budget in (8192, 2048, 600):
        with KVBoost.from_model(model, num_blocks=400, max_num_batched_tokens=budget) as kv:
            assert kv.attention_backend.startswith("triton")
            assert kv.generate(prompt, **options).token_ids == expected, budget


def test_batches_of_all_sizes_and_a_warm_up() -> None:
    model = build("llama")
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 320, (n % 40 + 1,), generator=generator).tolist() for n in range(45)]
    expected = [
        model.generate(torch.tensor([p], device="cuda"), max_new_tokens=20, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    options = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    with KVBoost.from_model(model, num_blocks=512, max_num_seqs=40) as kv:
        assert kv.warm_up() > 10
        for size in (1, 2, 3, 7, 17, 33, 45):
            assert [r.token_ids for r in kv.generate(prompts[:size], **options)] == expected[:size], size
        sampled = kv.generate(prompts[:9], max_new_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
        again = kv.generate(prompts[:3], max_new_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
        assert [r.token_ids for r in again] == [r.token_ids for r in sampled[:3]]
        params = [SamplingParams(temperature=0.8 * (i % 2), max_tokens=20, seed=3, ignore_eos=True) for i in range(9)]
        mixed = [r.token_ids for r in kv.generate(prompts[:9], sampling=params)]
        assert mixed[::2] == expected[:9:2], "greedy requests beside others"
        kv.engine.check()


def test_sequences_that_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups and one alone, of answers that end at different steps; then again, from captured graphs."""
    monkeypatch.setattr("kvboost.attention.sharing.LEAST_SAVED_TOKENS", 1)
    model = build("llama")
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(7)
    first, second, alone = (torch.randint(3, 320, (n,), generator=generator).tolist() for n in (70, 40, 30))
    prompts = [first + [5 + i] * (i + 1) for i in range(6)] + [[*second, 9 + i] for i in range(3)] + [alone]
    lengths = [4 + 3 * i for i in range(len(prompts))]
    expected = [
        model.generate(torch.tensor([p], device="cuda"), max_new_tokens=n, do_sample=False)[0, len(p) :].tolist()
        for p, n in zip(prompts, lengths, strict=True)
    ]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with KVBoost.from_model(model, num_blocks=128) as kv:
        for _ in range(3):
            assert [r.token_ids for r in kv.generate(prompts, sampling=sampling)] == expected
        assert any(shares for *_, shares in kv.built.runner._graphs._graphs), "no step shared keys"
        kv.check()
