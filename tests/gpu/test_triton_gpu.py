"""The Triton kernels compiled: what the unit tests interpret, in all dtypes, and sizes that only a GPU can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from triton_rig import (
    CASES,
    ROTARY_TYPES,
    Case,
    build,
    case_id,
    check,
    check_best_tokens,
    chunk,
    close,
    decode,
    expected,
)  # fmt: skip

pytest.importorskip("triton")

from kvboost.attention.paged_torch import PagedStep, Span
from kvboost.attention.paged_triton import TritonStep
from kvboost.attention.step_tensors import StepTensors
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.cache.pool import KVPool
from kvboost.kernels.triton.attention import paged_attention
from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from kvboost.kernels.triton.greedy import best_tokens
from kvboost.kernels.triton.rotary import rotary_write
from kvboost.kernels.triton.rotary_tables import rotary_tables
from kvboost.kernels.triton.skinny import skinny_linear
from kvboost.kernels.triton.support import unsupported

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
QWEN: dict[str, Any] = {"q_heads": 28, "kv_heads": 4, "dim": 128}

LARGE = (
    Case(decode(33_001), **QWEN, id="33k keys"),
    Case(decode(*(1 + (i * 37) % 700 for i in range(512))), **QWEN, id="batch of 512"),
    Case((chunk(33_000, 64),), **QWEN, id="64 new on 33k"),
    Case((chunk(0, 3_001),), **QWEN, id="fresh prompt of 3,001"),
    Case((chunk(5_000, 777), chunk(17, 300)), **{**QWEN, "dim": 96}, window=1_000, id="windowed chunks"),
    Case((*decode(*range(900, 930)), chunk(2_000, 500)), **QWEN, sinks=True, pad_seqs=4, pad_tokens=9, id="mixed"),
    Case(tuple(chunk(500 + 13 * i, 5) for i in range(64)), **QWEN, id="speculation of 64"),
    Case(((9_000, tuple(range(3, 9_000, 41))),), **QWEN, id="scattered"),
    Case((*decode(4_000, 77), chunk(900, 90)), q_heads=8, kv_heads=4, dim=256, softcap=50.0, window=512, id="Gemma"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_small_cases(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.parametrize("splits", [None, 1, 7])
@pytest.mark.parametrize("case", LARGE, ids=case_id)
def test_large_cases(case: Case, splits: int | None) -> None:
    check(case, torch.bfloat16, "cuda", splits=splits)


def test_pools_beyond_two_billion_elements() -> None:
    case = Case((*decode(300, 40), chunk(50, 40)), **QWEN)
    inputs = build(case, torch.bfloat16, "cuda")
    stride = 2**31 // (inputs.keys.shape[0] - 1)  # the last block begins beyond 2^31 elements
    stride -= stride % 128
    big = torch.empty(inputs.keys.shape[0] * stride + 2**20, dtype=torch.bfloat16, device="cuda")
    keys, values = (
        big.as_strided(x.shape, (stride, *x.stride()[1:]), offset).copy_(x)
        for x, offset in ((inputs.keys, 0), (inputs.values, inputs.keys[0].numel()))
    )
    close(paged_attention(inputs.query, keys, values, inputs.batch), expected(case, inputs))


@pytest.mark.parametrize("parts", ["decode", "mixed"])
def test_a_captured_graph_serves_other_contents(parts: str) -> None:
    """Captured over padding alone or one mix; replayed for batches that the capture never saw."""
    device = torch.device("cuda")
    layout = SlabLayout((LayerShape(4, 128, 4, 128),), 16, "bfloat16", 2)
    pool, other = (KVPool(layout, 700, torch.bfloat16, device) for _ in range(2))
    tensors = StepTensors(256, 32, 4096, 16, device)
    tokens, seqs = (16, 16) if parts == "decode" else (128, 16)
    captured_for = [] if parts == "decode" else [Span(3, 1, [1]), Span(0, 2, [2])]
    module: Any = SimpleNamespace(layer_idx=0)
    q = torch.randn(1, tokens, 28, 128, dtype=torch.bfloat16, device=device).transpose(1, 2)
    k, v = (torch.randn(1, tokens, 4, 128, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
    inputs = tensors.fill(captured_for, pad_tokens_to=tokens, pad_seqs_to=seqs)
    TritonStep(pool, inputs, {0: 0}).attend(module, q, k, v)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = TritonStep(pool, inputs, {0: 0}).attend(module, q, k, v)
    for lengths in ((5, 999, 1), (40,) * 15, (2000, 33)):
        spans, block = [], 1
        for i, length in enumerate(lengths):
            count = 1 if parts == "decode" or i == 0 else 6
            blocks = -(-(length + count) // 16)
            spans.append(Span(length, count, list(range(block, block + blocks))))
            block += blocks
        pool.slabs.normal_()
        other.slabs.copy_(pool.slabs)
        q.normal_()
        again = tensors.fill(spans, pad_tokens_to=tokens, pad_seqs_to=seqs)
        assert again.key == inputs.key
        graph.replay()
        real = sum(s.count for s in spans)
        reference = PagedStep(other, spans, {0: 0}).attend(module, q[:, :, :real], k[:, :, :real], v[:, :, :real])
        close(out[0, :real], reference[0].double())
        assert (out[0, real:] == 0).all() and torch.equal(pool.slabs, other.slabs)


# -- elementwise -------------------------------------------------------------------------------------------------------


def places_apart(out: Tensor, reference: Tensor) -> tuple[int, float]:
    """Largest distance in units of the last place of 16 bits, and the share of elements that differ."""
    assert out.dtype == reference.dtype and out.element_size() == 2

    def ordinal(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits + 32768), bits)

    apart = (ordinal(out) - ordinal(reference)).abs()
    return int(apart.max()), float((apart > 0).double().mean())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms(rows: int, dtype: torch.dtype) -> None:
    for kind, options in (
        (LlamaRMSNorm, {}),
        (Gemma2RMSNorm, {"round_first": False, "weight_offset": 1.0}),
    ):
        module: Any = kind(3584, eps=1e-6).to("cuda", dtype)
        module.weight.data.normal_(1.0, 0.2)
        x, residual = (torch.randn(1, rows, 3584, device="cuda").to(dtype) * 3 for _ in range(2))
        most, share = places_apart(rms_norm(x, module.weight, 1e-6, **options), module(x))
        assert most <= 1 and share < 0.01
        normed, total = add_rms_norm(x, residual, module.weight, 1e-6, **options)
        assert torch.equal(total, residual + x)
        most, share = places_apart(normed, module(total))
        assert most <= 2 and share < 0.01  # the sum is rounded before: 2 places were seen in fp16 on an H200


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_gives_the_same_bits(dtype: torch.dtype) -> None:
    case = Case((chunk(0, 300),), **QWEN)
    inputs = build(case, dtype, "cuda")
    q, k, v = (torch.randn(300, heads, 128, device="cuda").to(dtype) for heads in (28, 4, 4))
    angle = (torch.arange(300, device="cuda")[:, None] * torch.rand(64, device="cuda")).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q_ref, k_ref = (
        x[0].transpose(0, 1)
        for x in apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])
    )
    slots = torch.tensor(inputs.tables[0], device="cuda")[torch.arange(300, device="cuda") // 16] * 16
    slots += torch.arange(300, device="cuda") % 16
    rotary_write(q, k, v, cos, sin, inputs.keys, inputs.values, slots)
    assert torch.equal(q, q_ref) and torch.equal(k, k_ref)
    assert torch.equal(inputs.keys[inputs.tables[0]].flatten(0, 1)[:300], k_ref)
    assert torch.equal(inputs.values[inputs.tables[0]].flatten(0, 1)[:300], v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("kind", ROTARY_TYPES)
def test_rotary_tables_are_the_same_bits(kind: str, head_dim: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=1024, num_attention_heads=8, head_dim=head_dim, max_position_embeddings=131_072,
        rope_parameters=ROTARY_TYPES[kind],
    )  # fmt: skip
    module: Any = LlamaRotaryEmbedding(config).cuda()
    far = torch.randint(0, 131_072, (4000,), device="cuda")  # beyond 105,615 the angle is reduced in another way
    for positions in (torch.arange(5000, device="cuda"), far, torch.tensor([131_071], device="cuda"), far * 1000):
        own = module(torch.zeros(1, dtype=dtype, device="cuda"), positions[None])
        ours = rotary_tables(positions, module.inv_freq, module.attention_scaling, dtype)
        for a, b in zip(own, ours, strict=True):
            assert torch.equal(a[0], b), f"{int((a[0] != b).sum())} of {b.numel()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 152_064), (3, 50_257), (16, 152_064), (300, 32_003), (256, 151_936)])
def test_best_tokens(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, vocab, device="cuda").to(dtype)  # in 16 bits the largest is seldom alone
    check_best_tokens(logits)
    check_best_tokens(logits.round().clamp(max=2))
    check_best_tokens(torch.randn(rows, vocab + 61, device="cuda").to(dtype)[:, 29 : 29 + vocab])
    logits[0, vocab // 2 :] = -torch.inf
    logits[rows // 2] = -torch.inf
    check_best_tokens(logits)
    logits[rows // 3, [7, vocab - 1]] = torch.inf
    check_best_tokens(logits)
    logits[rows // 3, [vocab - 2, vocab - 3]] = torch.nan
    logits[rows - 1, vocab // 3] = -torch.nan
    check_best_tokens(logits)


def test_best_tokens_in_a_graph() -> None:
    logits = torch.zeros(5, 152_064, dtype=torch.bfloat16, device="cuda")
    best_tokens(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = best_tokens(logits)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert chosen[0].tolist() == logits.float().max(-1).indices.tolist()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")])
def test_act_mul(ours: str, theirs: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(33, 2 * 18944, device="cuda").to(dtype) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    reference = ACT2FN[theirs](gate) * up
    out = act_mul(gate_up, ours)
    if ours == "silu":
        most, share = places_apart(out, reference)
        assert most <= 2 and share < 0.01
    else:
        info = torch.finfo(dtype)
        allowed = 2 * info.eps * reference.float().abs() + 1e-6 * (gate * up).float().abs()
        allowed += info.tiny * info.eps * (1.0 + up.float().abs())
        assert ((out.float() - reference.float()).abs() <= allowed).all()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("n", "k"), [(3584, 3584), (4608, 3584), (3584, 18944), (1000, 96), (37888, 3584)])
@pytest.mark.parametrize("rows", [1, 3, 16, 32, 49])
def test_skinny_linear(rows: int, n: int, k: int, bias: bool) -> None:
    x, weight = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in (rows, n))
    b = torch.randn(n, device="cuda", dtype=torch.bfloat16) if bias else None
    out = skinny_linear(x, weight, b)
    reference = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    close(out, reference)
    assert torch.equal(out, skinny_linear(x, weight, b)), "the order of sums is fixed"
    total = torch.randn_like(out)
    both = reference + total.double()
    close(skinny_linear(x, weight, b, total=total), both)


def test_support() -> None:
    device = torch.device("cuda")
    assert unsupported([LayerShape(4, 128, 4, 128)], 28, torch.bfloat16, device) is None
    assert "wider than 256" in str(unsupported([LayerShape(4, 576, 4, 512)], 28, torch.bfloat16, device))
    assert "not a multiple" in str(unsupported([LayerShape(4, 128, 4, 128)], 30, torch.bfloat16, device))
    assert "value heads" in str(unsupported([LayerShape(4, 128, 2, 128)], 28, torch.bfloat16, device))
    assert "torch.float64" in str(unsupported([LayerShape(4, 128, 4, 128)], 28, torch.float64, device))
