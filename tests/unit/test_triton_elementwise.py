"""Norms, rotary, activations and the slot writer in Triton, interpreted on a CPU, against the modules of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary

from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from kvboost.kernels.triton.rotary import rotary_write
from kvboost.kernels.triton.write import write_slots

pytestmark = interpreted

DTYPES = [torch.float32, torch.float16]
NORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaRMSNorm, {}),
    "gpt-oss": (GptOssRMSNorm, {"round_first": False}),
    "gemma": (Gemma2RMSNorm, {"round_first": False, "weight_offset": 1.0}),
}


def same_to_the_last_place(out: Tensor, reference: Tensor, units: int = 1) -> None:
    """At most `units` steps of the dtype apart; 16-bit results nearly always equal."""
    apart = _ordinal(out) - _ordinal(reference)
    allowed = units if out.dtype != torch.float32 else 8 * units  # float32 sums in another order: a few places
    assert int(apart.abs().max()) <= allowed, f"{int(apart.abs().max())} units in the last place"
    if out.dtype != torch.float32:
        assert float((apart != 0).double().mean()) < 0.01


def _ordinal(x: Tensor) -> Tensor:
    """Integers in the order of floats."""
    bits = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).long()
    top = 1 << (31 if x.dtype == torch.float32 else 15)
    return torch.where(bits < 0, -(bits + top), bits)


def norm_of(name: str, width: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    kind, options = NORMS[name]
    module = kind(width, eps=1e-5)
    module.weight.data = torch.randn(width) * 0.3 + 1.0
    return module.to(dtype), options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    for shape in ((5, 96), (1, 1, 576), (2, 3, 64), (300, 48)):
        module, options = norm_of(name, shape[-1], dtype)
        x = (torch.randn(shape) * 3).to(dtype)
        same_to_the_last_place(rms_norm(x, module.weight, 1e-5, **options), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_add_rms_norm(name: str, dtype: torch.dtype) -> None:
    module, options = norm_of(name, 96, dtype)
    x, residual = (torch.randn(1, 7, 96) * 3).to(dtype), torch.randn(1, 7, 96).to(dtype)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, module.weight, 1e-5, **options)
    assert torch.equal(total, residual + x)
    assert torch.equal(residual, before)
    same_to_the_last_place(normed, module(total))


def test_norm_of_heads_inside_a_fused_projection() -> None:
    module, _ = norm_of("llama", 32, torch.float16)
    fused = torch.randn(1, 6, 5 * 32 + 64).half()
    heads = fused[..., : 5 * 32].view(1, 6, 5, 32)
    assert not heads.is_contiguous()
    same_to_the_last_place(rms_norm(heads, module.weight, 1e-5), module(heads))
    swapped = heads.transpose(1, 2)
    same_to_the_last_place(rms_norm(swapped, module.weight, 1e-5), module(swapped))
    before, expected = fused.clone(), module(heads)
    assert rms_norm(heads, module.weight, 1e-5, out=heads).data_ptr() == fused.data_ptr()
    same_to_the_last_place(heads, expected)
    assert torch.equal(fused[..., 5 * 32 :], before[..., 5 * 32 :]), "the rest of the projection stays"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")]
)  # fmt: skip
def test_act_mul(ours: str, theirs: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(2, 9, 2 * 1100) * 3).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    out, reference = act_mul(gate_up, ours), ACT2FN[theirs](gate) * up
    assert out.shape == reference.shape
    if theirs == "silu":
        same_to_the_last_place(out, reference)
    else:  # torch's 1 + tanh cancels for negative inputs, ours does not; then one place of the activation, one of the product
        info = torch.finfo(dtype)
        allowed = 2 * info.eps * reference.float().abs() + 1e-6 * (gate * up).float().abs()
        allowed += info.tiny * info.eps * (1.0 + up.float().abs())  # a place of a subnormal activation
        assert ((out.float() - reference.float()).abs() <= allowed).all()
        assert dtype == torch.float32 or float((out != reference).double().mean()) < 0.05


def pool_like(key: Tensor, value: Tensor, size: int = 8, blocks: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """(slabs, keys, values): slabs hold more than one layer, so that strides differ from those of a dense tensor."""
    row_k, row_v = key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]
    slabs = torch.full((blocks, size * (row_k + row_v) + 64), float("nan"), dtype=key.dtype)
    stride = slabs.stride(0)
    keys = slabs.as_strided((blocks, size, *key.shape[1:]), (stride, row_k, key.shape[2], 1), 32)
    values = slabs.as_strided((blocks, size, *value.shape[1:]), (stride, row_v, value.shape[2], 1), 32 + size * row_k)
    return slabs, keys, values


SLOTS = torch.tensor([13, -1, 1, 47, 8])
"""Slot 0 stays free: a token that must not be stored would go there first."""


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (80, 80)], ids=str)
def test_write_slots(dims: tuple[int, int]) -> None:
    fused = torch.randn(5, 3 * sum(dims))
    key = fused[:, : 3 * dims[0]].view(5, 3, dims[0])
    value = fused[:, 3 * dims[0] :].view(5, 3, dims[1])
    slabs, keys, values = pool_like(key, value)
    write_slots(key, value, keys, values, SLOTS)
    expected, expected_keys, expected_values = pool_like(key, value)
    _write(key, value, expected_keys, expected_values)
    assert torch.equal(slabs.nan_to_num(7e7), expected.nan_to_num(7e7)), "nothing else is written"


def _write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
    for i, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            keys[slot // 8, slot % 8] = key[i]
            values[slot // 8, slot % 8] = value[i]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "dim_v", "rotated"), [(16, 16, 16), (80, 80, 80), (96, 64, 48), (64, 64, 16)])
@pytest.mark.parametrize("heads", [(4, 2), (10, 9)], ids=str)
def test_rotary_write_gives_the_same_bits(
    dim: int, dim_v: int, rotated: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    q_heads, kv_heads = heads
    fused = torch.randn(5, q_heads * dim + kv_heads * (dim + dim_v)).to(dtype)
    q, k, v = fused.split([q_heads * dim, kv_heads * dim, kv_heads * dim_v], dim=1)
    q, k, v = q.view(5, q_heads, dim), k.view(5, kv_heads, dim), v.view(5, kv_heads, dim_v)
    angle = torch.randn(5, rotated // 2).repeat(1, 2) * 9
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rotate = apply_rotary_pos_emb if rotated == dim else apply_partial_rotary
    q_ref, k_ref = rotate(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])
    q_ref, k_ref = q_ref[0].transpose(0, 1).clone(), k_ref[0].transpose(0, 1).clone()
    v_ref = v.clone()
    slabs, keys, values = pool_like(k, v)
    rotary_write(q, k, v, cos, sin, keys, values, SLOTS)
    assert torch.equal(q, q_ref) and torch.equal(k, k_ref) and torch.equal(v, v_ref)
    expected, expected_keys, expected_values = pool_like(k, v)
    _write(k_ref, v_ref, expected_keys, expected_values)
    assert torch.equal(slabs.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="does not fit x with 8 columns"):
        rms_norm(x, weight[:4], 1e-6)
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(x.half(), weight, 1e-6)
    with pytest.raises(ValueError, match="must be like x"):
        rms_norm(x, weight, 1e-6, out=x[:1])
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="activation='relu'"):
        act_mul(x, "relu")
    with pytest.raises(ValueError, match="two equal parts"):
        act_mul(x[:, :3], "silu")
    key = torch.randn(5, 2, 16)
    _, keys, values = pool_like(key, key)
    with pytest.raises(ValueError, match="heads and dimensions"):
        write_slots(key[:, :1], key, keys, values, SLOTS)
    with pytest.raises(ValueError, match="one dtype"):
        write_slots(key.half(), key, keys, values, SLOTS)
    with pytest.raises(ValueError, match="4 slots for 5 keys"):
        write_slots(key, key, keys, values, SLOTS[:4])
    turn = torch.zeros(5, 16)
    with pytest.raises(ValueError, match="even number up to 16"):
        rotary_write(key, key, key, turn[:, :5], turn[:, :5], keys, values, SLOTS)
    with pytest.raises(ValueError, match="one dtype"):
        rotary_write(key, key, key, turn.half(), turn.half(), keys, values, SLOTS)
