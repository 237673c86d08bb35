"""Attention of pieces of prompts by Hopper's own instructions: what the unit tests run on a CPU, and sizes that only a GPU can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost import KVBoost
from triton_rig import Case, build, case_id, check, chunk, close, decode, expected

pytest.importorskip("triton")

from kvboost.kernels.cuda import prompt_attention
from kvboost.kernels.triton import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != prompt_attention.CAPABILITY,
        reason="needs a Hopper GPU",
    ),
]

QWEN: dict[str, Any] = {"q_heads": 28, "kv_heads": 4, "dim": 128}

CASES = (
    Case((chunk(0, 23),), **QWEN, id="fresh"),
    Case((chunk(300, 40),), **QWEN, id="chunk"),
    Case((chunk(128, 64), chunk(64, 64)), **QWEN, id="whole tiles of keys"),
    Case((chunk(45, 119), chunk(0, 35), chunk(200, 170)), q_heads=16, kv_heads=2, dim=128, id="several"),
    Case((*decode(20, 165), chunk(130, 112), chunk(0, 90)), **QWEN, id="beside decoding"),
    Case((chunk(1300, 62),), **QWEN, pad_seqs=3, pad_tokens=2, id="padded"),
    Case(((4000, tuple(range(3, 4000, 41))),), **QWEN, id="scattered positions"),
    Case((chunk(150, 133),), **QWEN, block_size=32, id="blocks of 32"),
    Case((chunk(1150, 133),), **QWEN, block_size=128, id="blocks of 128"),
    Case((chunk(260, 33),), q_heads=40, kv_heads=1, dim=128, scaling=0.2, id="a group of 40"),
    Case((chunk(777, 300),), q_heads=4, kv_heads=4, dim=128, id="a key head each"),
    Case((chunk(33_000, 64),), **QWEN, id="64 new on 33k"),
    Case((chunk(0, 3_001),), **QWEN, id="fresh prompt of 3,001"),
    Case((chunk(7_000, 1_500), chunk(17, 300)), **QWEN, id="long chunks"),
    Case(decode(*range(270, 334)), shared=((40, 9), (20, 12)), **QWEN, id="sequences that share keys"),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_attends_as_the_reference(
    case: Case, dtype: torch.dtype, splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []
    attend = prompt_attention.attend
    monkeypatch.setattr(prompt_attention, "attend", lambda *given: (launches.append(given), attend(*given)))
    check(case, dtype, "cuda", splits=splits)
    assert launches, "Triton served"


def test_numbers_that_are_none_beyond_the_end_of_a_page_are_not_seen() -> None:
    """Also where a launch before has left them in shared memory."""
    inputs = build(Case((chunk(1000, 57),), **QWEN), torch.bfloat16, "cuda")
    others = build(Case((chunk(1000, 64),), **QWEN), torch.bfloat16, "cuda", seed=1)
    others.values.fill_(torch.nan)
    for _ in range(3):
        attention.paged_attention(others.query, others.keys, others.values, others.batch)
        out = attention.paged_attention(inputs.query, inputs.keys, inputs.values, inputs.batch)
        close(out, expected(Case((chunk(1000, 57),), **QWEN), inputs))


def test_the_same_batch_gives_the_same_bits() -> None:
    whole = build(Case((chunk(2000, 300), chunk(90, 100)), **QWEN), torch.bfloat16, "cuda")
    together = attention.paged_attention(whole.query, whole.keys, whole.values, whole.batch, splits=2)
    again = attention.paged_attention(whole.query, whole.keys, whole.values, whole.batch, splits=2)
    assert torch.equal(together, again)


def test_refuses_what_it_does_not_know() -> None:
    inputs = build(CASES[0], torch.bfloat16, "cuda")
    given = (inputs.keys, inputs.values, inputs.batch.positions)
    assert prompt_attention.serves(inputs.query, *given)
    for query, keys in (
        (inputs.query.float(), inputs.keys),  # fp32
        (inputs.query[..., :64], inputs.keys),  # other heads
        (inputs.query, inputs.keys[:, :8]),  # pages of 8
        (inputs.query.transpose(1, 2).contiguous().transpose(1, 2), inputs.keys),  # not next to one another
    ):
        assert not prompt_attention.serves(query, keys, keys, inputs.batch.positions)


def tie(model: PreTrainedModel, ids: list[int], tokens: tuple[int, int]) -> bool:
    """Whether Transformers' own logits of two next tokens are no further apart than bf16 rounds each."""
    logits = model(torch.tensor([ids], device="cuda")).logits[0, -1].float()
    a, b = (float(logits[token]) for token in tokens)
    return abs(a - b) <= 2 * torch.finfo(torch.bfloat16).eps * max(abs(a), abs(b))


@torch.inference_mode()
@pytest.mark.parametrize("budget", [8192, 300])
def test_the_engine_answers_as_transformers(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, warm, in pieces, and in unequal batches, in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, head_dim=128,
        num_key_value_heads=1, max_position_embeddings=4096, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 320, (count,), generator=generator).tolist()

    shared = ids(1000)
    prompts = [
        shared[:known] + ids(own)
        for known, own in ((0, 20), (1000, 64), (700, 300), (1000, 1), (500, 1300), (1000, 40))
    ]
    expected = [
        model.generate(torch.tensor([p], device="cuda"), max_new_tokens=16, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    launches = []
    attend = prompt_attention.attend
    monkeypatch.setattr(prompt_attention, "attend", lambda *given: (launches.append(given), attend(*given)))
    with KVBoost.from_model(model, num_blocks=1024, max_num_batched_tokens=budget) as kv:
        for batch in ([prompts[1]], prompts, prompts[:3], [prompts[4]]):
            answers = kv.generate(batch, max_new_tokens=16, temperature=0, ignore_eos=True)
            for prompt, answer in zip(batch, answers, strict=True):
                want = expected[prompts.index(prompt)]
                for at, pair in enumerate(zip(answer.token_ids, want, strict=True)):
                    if pair[0] != pair[1]:
                        assert tie(model, prompt + want[:at], pair), (len(prompt), at)
                        break
        kv.check()
    assert launches, "Triton served"
