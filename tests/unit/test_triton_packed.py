"""Packed weights in Triton, interpreted on a CPU, against `Packing.dense`; bf16 is for a GPU (tests/gpu)."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from packed_rig import PACKINGS, packing_id, random_rows, unpacked_exactly
from triton_rig import close, interpreted

pytest.importorskip("triton")

from kvboost.kernels.triton import packed_codes, packed_linear
from kvboost.kernels.triton.packed import look_up, packed_many_rows, packed_product, unpack
from kvboost.kernels.triton.packed_linear import (
    PackedTile,
    by_group,
    chosen_splits,
    chosen_tile,
    packed_few_rows,
    step_weights,
)
from kvboost.weights.packing import Packing, Scheme

pytestmark = interpreted

DTYPES = [torch.float32, torch.float16]
INT4 = Packing(Scheme.ZEROS, 4, 256, 128)
INT4_WIDE = Packing(Scheme.ZEROS, 4, 5120, 128)
BYTES = Packing(Scheme.SYMMETRIC, 8, 96, 32)


def product(x: Tensor, rows: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    return linear(x.double(), packing.dense(rows).double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_product(packing: Packing, dtype: torch.dtype) -> None:
    """37 rows are no multiple of a tile; three splits, of which the last has less to do, and none."""
    weight, bias = random_rows(packing, 37), torch.randn(37).to(dtype)
    x = torch.randn(3, packing.k).to(dtype)
    for tile in (None, PackedTile(16, 64, 3, 2, 2), PackedTile(64, 128, 1, 2, 2)):
        close(packed_few_rows(x, weight, packing, bias, tile=tile), product(x, weight, packing, bias))


@pytest.mark.parametrize("packing", [INT4, Packing(Scheme.TWO_LEVEL_SIGNED, 6, 256, 16), BYTES], ids=packing_id)
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 64, 65])
def test_product_of_more_rows(rows: int, packing: Packing) -> None:
    weight = random_rows(packing, 19)
    for dtype in DTYPES:
        x = torch.randn(rows, packing.k).to(dtype)
        close(packed_few_rows(x, weight, packing), product(x, weight, packing))


@pytest.mark.parametrize("k", [96, 576, 1536, 5120])
def test_product_of_longer_rows(k: int) -> None:
    group = {96: 96, 576: 64}.get(k, 128)
    for packing in (Packing(Scheme.ZEROS, 4, k, group), Packing(Scheme.MINIMUM, 4, k, 32)):
        weight, x = random_rows(packing, 5), torch.randn(2, k).half()
        close(packed_few_rows(x, weight, packing), product(x, weight, packing))


def test_the_result_of_a_row_does_not_depend_on_how_often_it_is_computed() -> None:
    weight, x = random_rows(INT4, 70), torch.randn(4, 256).half()
    tile = PackedTile(16, 64, 4, 2, 2)
    first = packed_few_rows(x, weight, INT4, tile=tile)
    assert torch.equal(first, packed_few_rows(x, weight, INT4, tile=tile))
    assert torch.equal(first[2:3], packed_few_rows(x[2:3], weight, INT4, tile=tile))


def test_weights_and_inputs_may_be_parts_of_others() -> None:
    """Nothing is read that belongs to neighbours: they are NaN, or rows of 255."""
    around = torch.full((60, INT4.row_bytes), 255, dtype=torch.uint8)
    weight = around[10:47]
    weight.copy_(random_rows(INT4, 37))
    beside = torch.full((5, 400), float("nan"))
    x = beside[1:4, 100:356]
    x.normal_()
    close(packed_few_rows(x, weight, INT4), product(x, weight, INT4))
    close(packed_product(x, weight, INT4), product(x, weight, INT4))
    close(packed_product(x.T.contiguous().T, weight, INT4), product(x, weight, INT4), "x whose columns are contiguous")
    assert torch.equal(unpack(weight, INT4, torch.empty(37, 256)), INT4.dense(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_unpacking(packing: Packing, dtype: torch.dtype) -> None:
    """Bit for bit where the product is of integers and one scale; a fused multiply-add may round other schemes better."""
    weight = random_rows(packing, 11)
    out = unpack(weight, packing, torch.full((11, packing.k), float("nan"), dtype=dtype))
    unpacked_exactly(out, weight, packing)


def test_every_float8_code() -> None:
    packing = Packing(Scheme.FLOAT8, 8, 256, 256, 4)
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    weight = packing.pack(codes, torch.ones(1, 1))
    expected = packing.dense(weight)
    expected[0, 0x7F], expected[0, 0xFF] = 480.0, -480.0
    assert torch.equal(unpack(weight, packing, torch.empty(1, 256)), expected)
    for dtype in DTYPES:  # one x that is 1 picks one weight: codes on their way to a product
        picked = packed_few_rows(torch.eye(256, dtype=dtype), weight, packing)
        assert torch.equal(picked.T.float(), expected)


@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_looking_up(packing: Packing) -> None:
    weight = random_rows(packing, 9)
    index = torch.tensor([3, 0, 8, 3, 7])
    for dtype in DTYPES:
        unpacked_exactly(look_up(index, weight, packing, dtype), weight[index], packing)
    assert torch.equal(
        look_up(index.int(), weight, packing, torch.float16), look_up(index, weight, packing, torch.float16)
    )


def test_rows_that_a_table_does_not_have_are_nan() -> None:
    weight = random_rows(INT4, 9)
    found = look_up(torch.tensor([-1, 8, 9, 2**40]), weight, INT4, torch.float32)
    assert found[[0, 2, 3]].isnan().all() and torch.equal(found[1:2], INT4.dense(weight[8:]))
    assert look_up(torch.tensor([], dtype=torch.int64), weight, INT4, torch.float32).shape == (0, 256)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_many_rows_in_pieces(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, b = random_rows(INT4, 23), torch.randn(23) if bias else None
    x = torch.randn(40, 256)
    close(packed_many_rows(x, weight, INT4, b), product(x, weight, INT4, b))
    monkeypatch.setattr("kvboost.kernels.triton.packed.UNPACKED_BYTES", 5 * 256 * 4)  # pieces of 5 rows, the last of 3
    close(packed_many_rows(x, weight, INT4, b), product(x, weight, INT4, b))
    close(packed_product(x, weight, INT4, b), product(x, weight, INT4, b))
    assert packed_product(x[:0], weight, INT4, b).shape == (0, 23)


def run_ptx(source: str, register: int, outputs: int) -> list[int]:
    """What a few straight instructions leave in `$0, $1, ...` when the register after those holds `register`."""
    values = {f"${outputs}": register}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in re.findall(r"^(?:prmt|and|shr|lop3)\..*(?=;)", source, re.MULTILINE):
        operation, target, *operands = re.split(r"[ ,]+", line)
        inputs = [value(operand) for operand in operands]
        match operation:
            case "prmt.b32":
                both = inputs[0].to_bytes(4, "little") + inputs[1].to_bytes(4, "little")
                result = int.from_bytes([both[inputs[2] >> 4 * i & 7] for i in range(4)], "little")
            case "and.b32":
                result = inputs[0] & inputs[1]
            case "shr.u32":
                result = inputs[0] >> inputs[1]
            case "lop3.b32":
                assert inputs[3] == 0xEA  # of 0xF0, 0xCC and 0xAA
                result = inputs[0] & inputs[1] | inputs[2]
        values[target] = result
    return [values[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize(("name", "magic"), [("BF16", 0x4300), ("FP16", 0x6400)])
def test_the_ptx_splits_bytes_as_triton_does(name: str, magic: int) -> None:
    source = getattr(packed_codes, f"SPLIT_NIBBLES_{name}").value
    for byte in range(256):
        four = [byte, 255 - byte, byte ^ 0x5A, byte * 7 % 256]
        low, high = [b & 15 | magic for b in four], [b >> 4 | magic for b in four]
        lanes = [low[0] | low[1] << 16, low[2] | low[3] << 16, high[0] | high[1] << 16, high[2] | high[3] << 16]
        assert run_ptx(source, int.from_bytes(four, "little"), 4) == lanes


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 2.0**120), (torch.float16, 256.0)], ids=str)
def test_the_ptx_widens_float8(dtype: torch.dtype, factor: float) -> None:
    source = getattr(packed_codes, f"WIDEN_FLOAT8_{'BF16' if dtype is torch.bfloat16 else 'FP16'}").value
    codes = torch.arange(256, dtype=torch.uint8)
    words = [word for four in codes.view(64, 4).tolist() for word in run_ptx(source, int.from_bytes(four, "little"), 2)]
    widened = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(dtype) * factor
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    expected[0x7F], expected[0xFF] = 480.0, -480.0
    assert torch.equal(widened, expected)


def test_steps_fit_groups() -> None:
    """A scale that multiplies sums must be that of all weights of a step."""
    for packing in PACKINGS:
        step = step_weights(packing, 256)
        assert step >= 32 and step & (step - 1) == 0
        assert not by_group(packing) or (packing.group % step == 0 and packing.k % step == 0)
    assert step_weights(Packing(Scheme.ZEROS, 4, 960, 192), 128) == 64
    assert not by_group(Packing(Scheme.ZEROS, 4, 96, 96))  # 32 at a time would read 16 bytes of a row


def test_splits_fill_a_gpu_without_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "processors", lambda device: 132)
    device, down = torch.device("cpu"), Packing(Scheme.ZEROS, 4, 27_648, 128)
    wide = {rows: chosen_tile(INT4_WIDE, 55_296, rows, device) for rows in (1, 16, 32, 64)}
    assert wide[32].splits == wide[64].splits == 1  # there are enough, and sums of many rows are long
    assert 8 <= chosen_tile(INT4_WIDE, 1024, 1, device).splits <= 10  # 16 blocks, 40 steps of which 4 stay together
    assert chosen_tile(down, 5120, 1, device).splits > chosen_tile(down, 5120, 64, device).splits  # sums cost more
    assert chosen_tile(Packing(Scheme.ZEROS, 4, 256, 128), 64, 1, device).splits == 1  # two steps
    for blocks, steps, programs in ((0.1, 1, 8), (0.6, 40, 8), (6.5, 40, 6), (300.0, 216, 2)):
        splits = chosen_splits(blocks, steps, programs, 0.003, 0.1)
        assert 1 <= splits <= 16 and -(-steps // -(-steps // splits)) == splits


def test_a_measured_tile_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = PackedTile(32, 64, 2, 4, 3)
    monkeypatch.setitem(packed_linear.MEASURED, (4, 300, 256, 8), tile)
    assert chosen_tile(INT4, 300, 8, torch.device("cpu")) is tile
    assert chosen_tile(INT4, 300, 9, torch.device("cpu")) != tile


def test_what_does_not_fit_is_refused() -> None:
    weight, x = random_rows(INT4, 9), torch.randn(3, 256)
    with pytest.raises(ValueError, match="one row or more"):
        packed_few_rows(x[:0], weight, INT4)
    with pytest.raises(ValueError, match=r"must be \[rows, 256\]"):
        packed_few_rows(x[:, :128], weight, INT4)
    with pytest.raises(ValueError, match="must be uint8"):
        packed_few_rows(x, weight[:, :-16], INT4)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        unpack(torch.zeros(9 * INT4.row_bytes + 8, dtype=torch.uint8)[8:].view(9, -1), INT4, torch.empty(9, 256))
    with pytest.raises(ValueError, match=r"bias \(7,\)"):
        packed_few_rows(x, weight, INT4, torch.zeros(7))
    with pytest.raises(ValueError, match=r"must be a contiguous \[9, 256\]"):
        unpack(weight, INT4, torch.empty(9, 128))
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        unpack(weight, INT4, torch.empty(9, 256, dtype=torch.float64))
    with pytest.raises(ValueError, match="vector of int64"):
        look_up(torch.zeros(2, 2, dtype=torch.int64), weight, INT4, torch.float32)
