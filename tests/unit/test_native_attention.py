"""The C++ attention against the plain PyTorch one, on pools whose blocks lie in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvboost.attention.paged_native import NativeStep, unsupported
from kvboost.attention.paged_torch import PagedStep, Span
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.cache.pool import KVPool
from kvboost.kernels.native.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

MODULE = SimpleNamespace(layer_idx=5)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def spans_of(pieces: list[tuple[int, int]], block_size: int) -> tuple[list[Span], int]:
    """Spans for `(start, count)` pieces, decoders first, over shuffled blocks; and the number of blocks."""
    pieces = sorted(pieces, key=lambda piece: piece[1] > 1)
    needed = [-(-(start + count) // block_size) for start, count in pieces]
    free = list(range(sum(needed) + 1))
    random.shuffle(free)
    spans = [
        Span(start, count, [free.pop() for _ in range(blocks)])
        for (start, count), blocks in zip(pieces, needed, strict=True)
    ]
    return spans, sum(needed) + 1


def both(
    pieces: list[tuple[int, int]],
    shape: LayerShape,
    q_heads: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Outputs `[1, T, Hq, Dv]` of C++ and of PyTorch in fp32; the pools must end up the same."""
    return both_over(*spans_of(pieces, block_size), shape, q_heads, block_size, dtype, **options)


def both_over(
    spans: list[Span],
    num_blocks: int,
    shape: LayerShape,
    q_heads: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    layout = SlabLayout((LayerShape(1, 8, 1, 8), shape), block_size, "x", dtype.itemsize)
    rows = sum(span.count for span in spans)
    query, key, value = (
        torch.randn(1, heads, rows, dim).to(dtype)
        for heads, dim in ((q_heads, shape.k_dim), (shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim))
    )
    base = torch.randn(num_blocks, layout.slab_elements).to(dtype)
    native = KVPool(layout, num_blocks, dtype, torch.device("cpu"))
    native.slabs.copy_(base)
    step = NativeStep(native, spans, {5: 1})
    ours = step.attend(MODULE, query, key, value, **options)  # type: ignore[arg-type]
    assert step.num_attended == 1
    wide = SlabLayout(layout.layers, block_size, "x", 4)
    plain = KVPool(wide, num_blocks, torch.float32, torch.device("cpu"))
    elements = layout.bytes_per_token * block_size // dtype.itemsize
    plain.slabs[:, :elements] = base[:, :elements].float()
    reference = PagedStep(plain, spans, {5: 1})
    theirs = reference.attend(MODULE, query.float(), key.float(), value.float(), **options)  # type: ignore[arg-type]
    assert torch.equal(native.slabs[:, :elements].float(), plain.slabs[:, :elements])
    return ours, theirs


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2e-2
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_sequences_and_options(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(random.choice([1, 2]))
    heads, group, dim = random.choice([1, 2, 3]), random.choice([1, 2, 3, 7, 8]), random.choice([8, 16, 64, 80, 128])
    shape = LayerShape(heads, dim, heads, random.choice([dim, dim, 16, 24]))
    pieces = [
        (random.choice([0, 1, random.randrange(700)]), random.choice([1, 1, 1, 2, 5, random.randrange(1, 150)]))
        for _ in range(random.randrange(1, 6))
    ]
    options: dict[str, Any] = {}
    if random.random() < 0.4:
        options["sliding_window"] = random.choice([1, 5, 17, 100, 300])
    if random.random() < 0.3:
        options["softcap"] = random.choice([5.0, 50.0])
    if random.random() < 0.3:
        options["s_aux"] = torch.randn(heads * group)
    if random.random() < 0.5:
        options["scaling"] = 0.1
    dtype = random.choice([torch.float32, torch.bfloat16])
    assert_near(*both(pieces, shape, heads * group, random.choice([8, 16, 32]), dtype, **options))


@pytest.mark.parametrize("window", [None, 1, 37, 64, 300, 700])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (0, 64), (3, 40), (900, 33), (613, 150)])
def test_prompts_of_heads_that_fit_matrix_units(start: int, count: int, window: int | None) -> None:
    """In bf16, where the processor has them; in pieces, as one tile of rows has too little work for two threads."""
    torch.set_num_threads(2)
    for shape, q_heads, block_size in ((LayerShape(1, 64, 1, 64), 3, 16), (LayerShape(2, 96, 2, 32), 2, 32)):
        options = {"sliding_window": window, "softcap": 30.0 if count == 40 else None}
        assert_near(*both([(start, count)], shape, q_heads, block_size, torch.bfloat16, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("other_units")
def test_prompts_by_other_units() -> None:
    for start, count in ((0, 9), (0, 64), (3, 40), (900, 33), (613, 150)):
        for window in (None, 1, 37, 300):
            test_prompts_of_heads_that_fit_matrix_units(start, count, window)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 129, 5000])
def test_decode_at_every_kind_of_length(length: int) -> None:
    torch.set_num_threads(2)
    assert_near(*both([(length - 1, 1)], LayerShape(2, 64, 2, 64), 6))


def test_a_large_batch_of_unequal_lengths() -> None:
    torch.set_num_threads(2)
    pieces = [(random.randrange(300), 1) for _ in range(64)]
    assert_near(*both(pieces, LayerShape(2, 64, 2, 64), 4))


def sharing(prefixes: list[tuple[int, int]], block_size: int, tree: bool) -> tuple[list[Span], int]:
    """Decoding sequences in any order: for each `(blocks, members)` so many that begin with the same blocks, and go on alone
    for up to 90 tokens. tree: all have the first 3 blocks in common besides."""
    free = list(range(5000))
    random.shuffle(free)
    root = [free.pop() for _ in range(3)] if tree else []
    spans = []
    for blocks, members in prefixes:
        common = root + [free.pop() for _ in range(blocks)]
        for _ in range(members):
            start = len(common) * block_size + random.randrange(90)
            own = start // block_size + 1 - len(common)
            spans.append(Span(start, 1, common + [free.pop() for _ in range(own)]))
    random.shuffle(spans)
    return spans, 5000


@pytest.mark.parametrize("seed", range(24))
def test_sequences_that_begin_alike(seed: int) -> None:
    """Their shared keys are computed for all at once: equal to each alone, with prompts in between, for any group size."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1 + seed % 2)
    heads, group = random.choice([1, 2]), random.choice([1, 2, 3, 8, 24, 25, 50])
    shape = LayerShape(heads, 64, heads, random.choice([64, 48]))
    block_size = random.choice([8, 16, 32])
    prefixes = [
        (random.choice([1, 5, 9, 40]), random.choice([1, 2, 3, 9, 17, 33])) for _ in range(random.choice([1, 2, 4]))
    ]
    spans, blocks = sharing(prefixes, block_size, tree=seed % 3 == 0)
    if seed % 4 == 0:  # prompts behind the same blocks take their own way
        spans += [Span(s.start, 5, [*s.table, 4999 - i]) for i, s in enumerate(spans[:3]) if s.start % block_size == 0]
    options: dict[str, Any] = {"softcap": 20.0} if seed % 5 == 0 else {}
    if seed % 7 == 0:
        options["s_aux"] = torch.randn(heads * group)
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    assert_near(*both_over(spans, blocks, shape, heads * group, block_size, dtype, **options))


def test_a_window_does_not_share() -> None:
    spans, blocks = sharing([(30, 20)], 16, tree=False)
    assert_near(*both_over(spans, blocks, LayerShape(2, 64, 2, 64), 6, sliding_window=100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 21])
def test_slots_beyond_a_sequence_are_never_read(count: int, dtype: torch.dtype) -> None:
    """NaN left in the unused slots of a block, or in other blocks, reaches no one."""
    layout = SlabLayout((LayerShape(1, 32, 1, 32),), 16, "x", dtype.itemsize)
    pool = KVPool(layout, 4, dtype, torch.device("cpu"))
    pool.slabs.fill_(float("nan"))
    tokens = torch.randn(1, 1, count, 32).to(dtype)
    out = NativeStep(pool, [Span(0, count, [2, 0])], {5: 0}).attend(MODULE, tokens, tokens, tokens)  # type: ignore[arg-type]
    assert torch.isfinite(out).all()


def test_packed_product_equals_separate_tensors() -> None:
    """`attend_packed` without rotation is `attend` of the parts; with it, half-rotation of q and k."""
    torch.manual_seed(1)
    q_heads, heads, dim, v_dim, rotary = 6, 2, 32, 24, 16
    layout = SlabLayout((LayerShape(heads, dim, heads, v_dim),), 16, "x", 4)
    qkv = torch.randn(7, q_heads * dim + heads * (dim + v_dim))
    q, k, v = qkv.split((q_heads * dim, heads * dim, heads * v_dim), dim=1)
    q, k = q.reshape(7, q_heads, dim), k.reshape(7, heads, dim)
    angle = torch.randn(7, rotary // 2)
    cos, sin = (torch.cat((f(angle), f(angle)), dim=1) for f in (torch.cos, torch.sin))

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        c, s = cos[:, None, : rotary // 2], sin[:, None, : rotary // 2]
        return torch.cat((a * c - b * s, b * c + a * s, x[..., rotary:]), dim=-1)

    spans = [Span(0, 7, [1, 3])]
    pools = [KVPool(layout, 4, torch.float32, torch.device("cpu")) for _ in range(2)]
    apart = [x.transpose(0, 1).unsqueeze(0) for x in (turned(q), turned(k), v.reshape(7, heads, v_dim))]
    expected = NativeStep(pools[0], spans, {5: 0}).attend(MODULE, *apart)  # type: ignore[arg-type]
    out = NativeStep(pools[1], spans, {5: 0}).attend_packed(5, qkv.clone(), q_heads, (cos, sin))
    torch.testing.assert_close(out, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(pools[0].slabs, pools[1].slabs, atol=1e-6, rtol=1e-6)


def test_what_cannot_be_served_is_named() -> None:
    shape = (LayerShape(2, 64, 2, 64),)
    assert unsupported(shape, torch.float32, torch.device("cpu")) is None
    assert "float16" in str(unsupported(shape, torch.float16, torch.device("cpu")))
    assert "cuda" in str(unsupported(shape, torch.float32, torch.device("cuda")))
    assert "heads" in str(unsupported((LayerShape(2, 64, 1, 64),), torch.float32, torch.device("cpu")))
