"""Products with packed weights by the compiled kernels, against `Packing.dense` and a product in fp64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost import KVBoost
from kvboost.attention.interface import attach
from kvboost.kernels.native import build, library
from kvboost.kernels.native import linear as native
from kvboost.kernels.native.library import unavailable
from kvboost.models.fused.cpu import CpuOps
from kvboost.models.fused.fuse import fuse
from kvboost.models.fused.ops import Piece, Product
from kvboost.weights import compute
from kvboost.weights.compute import looked_up, packed_linear
from kvboost.weights.modules import PackedEmbedding, PackedLinear
from kvboost.weights.packing import Packing, Scheme

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""Of ‖y - exact‖ / ‖exact‖. bf16 rounds the product to 8 bits; and, for many rows, the weights too."""

PACKINGS = [
    Packing(Scheme.SYMMETRIC, 4, 576, 32), Packing(Scheme.SYMMETRIC, 4, 96, 96, 4),
    Packing(Scheme.SYMMETRIC, 5, 576, 32), Packing(Scheme.SYMMETRIC, 5, 64, 64, 4),
    Packing(Scheme.SYMMETRIC, 8, 576, 32), Packing(Scheme.SYMMETRIC, 8, 160, 160, 4),
    Packing(Scheme.ZEROS, 4, 576, 64), Packing(Scheme.ZEROS, 4, 96, 32), Packing(Scheme.ZEROS, 4, 384, 128, 4),
    Packing(Scheme.ZEROS, 8, 576, 64), Packing(Scheme.ZEROS, 8, 32, 32, 4),
    Packing(Scheme.MINIMUM, 4, 576, 32), Packing(Scheme.MINIMUM, 4, 32, 32, 4),
    Packing(Scheme.MINIMUM, 5, 576, 32), Packing(Scheme.MINIMUM, 5, 96, 96, 4),
    Packing(Scheme.TWO_LEVEL, 4, 768, 32), Packing(Scheme.TWO_LEVEL, 5, 256, 32),
    Packing(Scheme.TWO_LEVEL_SIGNED, 6, 768, 16),
    Packing(Scheme.FLOAT8, 8, 576, 32), Packing(Scheme.FLOAT8, 8, 96, 96, 4),
]  # fmt: skip


def name_of(packing: Packing) -> str:
    return f"{packing.scheme.value}-{packing.bits}-k{packing.k}-g{packing.group}-s{packing.scale_bytes}"


def random_rows(packing: Packing, n: int, seed: int = 0) -> Tensor:
    """Packed rows that use every code, with scales of both signs."""
    torch.manual_seed(seed)
    groups, signed = packing.groups, torch.randn
    codes = torch.randint(0, 1 << packing.bits, (n, packing.k), dtype=torch.uint8)
    if packing.scheme is Scheme.TWO_LEVEL:
        return packing.pack(codes, signed(n, packing.k // 256, 2), torch.randint(0, 64, (n, groups, 2)).byte())
    if packing.scheme is Scheme.TWO_LEVEL_SIGNED:
        return packing.pack(codes, signed(n, packing.k // 256), torch.randint(-128, 128, (n, groups)).to(torch.int8))
    scales = signed(n, groups)
    if packing.scheme is Scheme.ZEROS:
        return packing.pack(codes, scales, torch.randint(0, 1 << packing.bits, (n, groups)).byte())
    if packing.scheme is Scheme.MINIMUM:
        return packing.pack(codes, scales, signed(n, groups) * 9)
    if packing.scheme is Scheme.FLOAT8:  # 127 and 255 are NaN
        codes = torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)
    return packing.pack(codes, scales)


def error(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((y.double() - exact).norm() / exact.norm())


# -- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(packing: Packing, dtype: torch.dtype) -> None:
    """1 to 4 rows are computed in registers; up to 16, or 2,048 with AMX, from rows unpacked on the way; more by torch."""
    for n in (192, 37):
        rows = random_rows(packing, n)
        weight, bias = packing.dense(rows), torch.randn(n, dtype=dtype)
        for count in (1, 2, 3, 4, 5, 16, 17, 97, 2049):
            wide = torch.randn(count, packing.k + 3, dtype=dtype)
            x = wide[:, : packing.k]  # rows that do not follow one another
            b = bias if n + count & 1 else None
            y = packed_linear(x, rows, packing, b)
            assert y.dtype == dtype and y.shape == (count, n)
            assert error(y, x, weight, b) < TOLERANCE[dtype], (n, count)


@pytest.mark.parametrize("packing", PACKINGS, ids=name_of)
def test_every_weight_counts_where_it_stands(packing: Packing) -> None:
    """The product with the identity is the weight itself: what a norm of random rows could hide shows here."""
    rows = random_rows(packing, 5)
    weight, identity = packing.dense(rows), torch.eye(packing.k)
    for count in (1, 4, packing.k):
        y = torch.cat([packed_linear(x, rows, packing) for x in identity.split(count)])
        torch.testing.assert_close(y, weight.T, rtol=1e-6, atol=1e-6 * float(weight.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_in_pieces_that_share_their_memory(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Packing(Scheme.MINIMUM, 4, 96, 32)
    rows, x = random_rows(packing, 50), torch.randn(40, 96)
    added = torch.randn(50) if bias else None
    monkeypatch.setattr(compute, "REUSED_BYTES", 7 * 96 * 4)
    first, second = (packed_linear(x, rows, packing, added) for _ in range(2))
    assert error(first, x, packing.dense(rows), added) < TOLERANCE[torch.float32] and first.equal(second)


def test_no_rows() -> None:
    packing = PACKINGS[0]
    assert packed_linear(torch.zeros(0, packing.k), random_rows(packing, 8), packing).shape == (0, 8)


def test_gradients_flow_through_packed_weights() -> None:
    packing = PACKINGS[0]
    module = PackedLinear(random_rows(packing, 8), packing)
    x = torch.randn(2, packing.k, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, packing.dense(module.weight).sum(0).expand(2, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 5, 16, 40, 600])
def test_pieces_of_different_kinds_lie_side_by_side(dtype: torch.dtype, rows: int) -> None:
    """What q, k and v of one layer may be: two packings, or one and a dense matrix."""
    k = 512
    packings = [Packing(Scheme.TWO_LEVEL, 4, k, 32), None, Packing(Scheme.TWO_LEVEL_SIGNED, 6, k, 16)]
    for sizes in ((64, 32, 96), (33, 1, 20)):  # AMX wants multiples of 32
        pieces, expected = [], []
        x = torch.randn(rows, k, dtype=dtype)
        for n, packing in zip(sizes, packings, strict=True):
            raw = torch.randn(n, k, dtype=dtype) if packing is None else random_rows(packing, n)
            bias = None if packing is None else torch.randn(n, dtype=dtype)
            weight = raw if packing is None else packing.dense(raw)
            pieces.append(Piece(raw, bias, packing))
            expected.append(linear(x.double(), weight.double(), None if bias is None else bias.double()))
        y = CpuOps().linear(x, Product(*pieces))
        for part, exact in zip(y.split(sizes, dim=1), expected, strict=True):
            assert (part.double() - exact).norm() / exact.norm() < TOLERANCE[dtype]


def test_pieces_on_a_gpu_are_computed_one_by_one() -> None:
    pytest.importorskip("triton")
    from kvboost.models.fused.gpu import GpuOps

    packing = PACKINGS[0]
    dense, rows = torch.randn(8, packing.k), random_rows(packing, 24)
    x, bias = torch.randn(3, packing.k), torch.randn(24)
    y = GpuOps().linear(x, Product(Piece(dense), Piece(rows, bias, packing)))
    torch.testing.assert_close(y[:, :8], linear(x, dense))
    assert error(y[:, 8:], x, packing.dense(rows), bias) < TOLERANCE[torch.float32]


def test_tensors_of_another_dtype_are_refused() -> None:
    """The kernels read addresses: a bias of fp32 would be taken for one of bf16."""
    packing = PACKINGS[0]
    piece = Piece(random_rows(packing, 8), torch.zeros(8), packing)
    with pytest.raises(TypeError, match="dtype"):
        native.weights_of([piece], torch.bfloat16)
    with pytest.raises(TypeError, match="dtype"):
        native.weights_of([Piece(torch.zeros(8, 32))], torch.bfloat16)


def test_what_does_not_fit_is_refused() -> None:
    """Before an address leaves Python."""
    packing = PACKINGS[0]
    rows = random_rows(packing, 8)
    with pytest.raises(ValueError, match="576"):
        packed_linear(torch.zeros(1, 544), rows, packing)
    for bad in (rows[:, :-16].contiguous(), rows.view(torch.int8)):
        with pytest.raises(ValueError, match="uint8"):
            packed_linear(torch.zeros(1, packing.k), bad, packing)
        with pytest.raises(ValueError, match="uint8"):
            looked_up(torch.tensor([0]), bad, packing, torch.float32)


# -- unpacking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS, ids=name_of)
def test_unpacked_rows_are_the_references(packing: Packing) -> None:
    rows = random_rows(packing, 21)
    ours, reference = native.unpack(rows, packing, torch.float32), packing.dense(rows)
    if packing.scheme in (Scheme.SYMMETRIC, Scheme.FLOAT8) and packing.scale_bytes == 2:
        assert torch.equal(ours, reference), "fp16 scales times small codes have no rounding"
    # One rounding more or less, of the largest term.
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6 * float(reference.abs().max()))
    halves = native.unpack(rows, packing, torch.bfloat16)
    torch.testing.assert_close(halves, reference.bfloat16(), rtol=2**-7, atol=1e-6 * float(reference.abs().max()))


def test_all_float8_numbers() -> None:
    packing = Packing(Scheme.FLOAT8, 8, 256, 256, 4)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    rows = packing.pack(codes, torch.tensor([[0.5]]))
    expected = codes.float() * 0.5
    assert expected.isnan().sum() == 2
    assert torch.equal(native.unpack(rows, packing, torch.float32).nan_to_num(7), expected.nan_to_num(7))
    assert packed_linear(torch.ones(1, 256), rows, packing).isnan().all()


def test_all_fp16_scales() -> None:
    """Subnormal ones, zeros of both signs and infinities; 31 rows so that the last scales have no full vector."""
    scales = torch.arange(0, 65536, 7, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = scales[~scales.isnan()][: 31 * 290].view(290, 31)
    packing = Packing(Scheme.SYMMETRIC, 8, 31 * 32, 32)
    rows = packing.pack(torch.ones(290, packing.k, dtype=torch.int8), scales)
    assert torch.equal(native.unpack(rows, packing, torch.float32), scales.float().repeat_interleave(32, dim=1))


def test_rows_are_looked_up() -> None:
    packing = PACKINGS[4]
    rows = random_rows(packing, 40)
    for index in (torch.tensor([39, 0, 7, 7]), torch.tensor([3], dtype=torch.int32), torch.arange(40)[::3]):
        for dtype in DTYPES:
            expected = packing.dense(rows[index.long()], dtype)
            assert torch.equal(looked_up(index, rows, packing, dtype), expected)
    assert looked_up(torch.empty(0, dtype=torch.long), rows, packing, torch.float32).shape == (0, packing.k)


@pytest.mark.parametrize("index", [-1, 40, 1 << 40])
def test_no_row_outside_is_read(index: int) -> None:
    packing = PACKINGS[4]
    with pytest.raises(IndexError, match=str(index)):
        looked_up(torch.tensor([1, index]), random_rows(packing, 40), packing, torch.float32)


def test_an_embedding_with_a_scale() -> None:
    packing = PACKINGS[4]
    rows = random_rows(packing, 40)
    module = PackedEmbedding(rows, packing, torch.bfloat16, scale=24.0)
    ids = torch.tensor([[1, 2, 3], [39, 0, 0]])
    expected = packing.dense(rows, torch.bfloat16)[ids] * torch.tensor(24.0, dtype=torch.bfloat16)
    assert torch.equal(module(ids), expected)


# -- in a model ----------------------------------------------------------------------------------------------------

MIXED = {"q_proj": (Scheme.TWO_LEVEL, 4, 32), "k_proj": (Scheme.TWO_LEVEL, 4, 32), "v_proj": (Scheme.TWO_LEVEL_SIGNED, 6, 16),
         "o_proj": (Scheme.ZEROS, 4, 64), "gate_proj": (Scheme.MINIMUM, 4, 32), "up_proj": (Scheme.MINIMUM, 4, 32),
         "down_proj": (Scheme.SYMMETRIC, 5, 32), "lm_head": (Scheme.SYMMETRIC, 8, 32)}  # fmt: skip
"""Kinds of one layer as files mix them."""


def packed_and_dense(dtype: torch.dtype, keep: tuple[str, ...] = ()) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny Llama with packed linears, except those in `keep`, and its twin with the same weights dense."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    dense = LlamaForCausalLM(config).to(dtype).eval()
    packed = copy.deepcopy(dense)
    with torch.no_grad():
        for path, module in list(packed.named_modules()):
            parent, _, name = path.rpartition(".")
            if not isinstance(module, nn.Linear) or name in keep:
                continue
            scheme, bits, group = MIXED[name]
            packing = Packing(scheme, bits, module.in_features, group)
            rows = random_rows(packing, module.out_features, seed=len(path))
            rows = scaled(rows, packing, 0.05 / float(packing.dense(rows).std()))
            setattr(packed.get_submodule(parent), name, PackedLinear(rows, packing, module.bias))
            dense.get_submodule(path).weight.copy_(packing.dense(rows))
    return packed, dense


def scaled(rows: Tensor, packing: Packing, factor: float) -> Tensor:
    """The same codes with fp16 scales (and minima) times `factor`."""
    count = packing.groups if packing.scheme.value[:3] != "two" else packing.k // 256
    count *= 2 if packing.scheme in (Scheme.TWO_LEVEL, Scheme.MINIMUM) else 1
    out, part = rows.clone(), slice(packing.scales_at, packing.scales_at + 2 * count)
    out[:, part] = (rows[:, part].contiguous().view(torch.float16) * factor).view(torch.uint8)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_mixed_packings_are_fused_whole(dtype: torch.dtype) -> None:
    packed, dense = packed_and_dense(dtype)
    own = packed.model.layers[0].self_attn
    before = [own.q_proj.weight.clone(), own.k_proj.weight.clone()]
    for model in (packed, dense):
        assert attach(model)
        assert fuse(model, CpuOps(), 256) == {
            "layers": 2,
            "attention": 2,
            "mlp": 2,
            "experts": 0,
            "routers": 0,
            "mixtures": 0,
            "norms": 5,
            "linears": 1,
            "rotary": 0,
        }
    q, k = own.q_proj.weight, own.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + q.nbytes, "rows of one packing are one piece"
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("keep", [(), ("v_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "down_proj")], ids=str)
def test_generation_equals_that_of_the_dense_twin(keep: tuple[str, ...]) -> None:
    """Prefill, decode and a batch, in fp32: the same tokens, some of them after a prompt of more rows than 16."""
    packed, dense = packed_and_dense(torch.float32, keep)
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 40)]
    answers = []
    for model in (packed, dense):
        with KVBoost.from_model(model, num_blocks=64) as kv:
            assert kv.built.fused["layers"] == 2
            outs = kv.generate(prompts, max_new_tokens=12, temperature=0, ignore_eos=True)
            answers.append([out.token_ids for out in outs])
    assert answers[0] == answers[1]
    ids = torch.tensor([prompts[2]])
    with torch.no_grad():
        ours, theirs = packed(ids).logits, dense(ids).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


# -- other processors ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["x86-64-v3", "x86-64"])
def test_without_avx512(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources compiled for lesser processors."""
    if build.platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86")
    flags = tuple(f"-march={architecture}" if flag.startswith("-march") else flag for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", flags)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    assert not library.load().kvb_has_amx()
    for packing in PACKINGS:
        for dtype in DTYPES:
            test_products(packing, dtype)
        test_unpacked_rows_are_the_references(packing)
    test_all_float8_numbers()
    test_all_fp16_scales()
