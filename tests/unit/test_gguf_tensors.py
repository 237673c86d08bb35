"""GGUF blocks as packed rows: the very values that the `gguf` package unpacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from gguf_files import blocks
from kvboost.weights import gguf_tensors
from kvboost.weights.gguf_reader import GGUFFile, read_gguf
from kvboost.weights.gguf_tensors import fill_dense, fill_packed, packing_of

PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def file_with(path: Path, kind: str, shape: tuple[int, ...]) -> tuple[GGUFFile, np.ndarray]:
    """A file with one tensor, and its bytes."""
    raw = blocks(np.random.default_rng(3), shape, kind)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=None if raw.dtype != np.uint8 else GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path), raw


@pytest.mark.parametrize("k", [256, 768, 1536])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_mean_what_the_blocks_mean(
    kind: str, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "PIECE_BYTES", 4096)  # several pieces, the last one short
    file, raw = file_with(tmp_path / "x.gguf", kind, (77, k))
    info = file.tensors["w"]
    packing = packing_of(info)
    assert packing is not None and packing.k == k
    rows = torch.full((77, packing.row_bytes), 255, dtype=torch.uint8)
    with file.open() as data:
        fill_packed(data, info, packing, rows)
    expected = dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_array_max_ulp(packing.dense(rows).numpy(), expected, maxulp=1)
    assert np.abs(expected).max() > 0.01
    beside = {"minimum": 2, "two_level": 2, "two_level_signed": 1}.get(packing.scheme.value, 0)
    used = packing.beside_at + beside * packing.groups
    assert not rows[:, used:].any()  # padding is zeros


@pytest.mark.parametrize("k", [32, 96, 576])
@pytest.mark.parametrize("kind", PACKED[:5])
def test_rows_that_are_multiples_of_32_only(kind: str, k: int, tmp_path: Path) -> None:
    file, raw = file_with(tmp_path / "x.gguf", kind, (5, k))
    packing = packing_of(file.tensors["w"])
    assert packing is not None
    rows = torch.empty(5, packing.row_bytes, dtype=torch.uint8)
    with file.open() as data:
        fill_packed(data, file.tensors["w"], packing, rows)
    np.testing.assert_array_max_ulp(packing.dense(rows).numpy(), dequantize(raw, GGMLQuantizationType[kind]), maxulp=1)


@pytest.mark.parametrize("kind", [*PACKED, "Q2_K", "F16", "F32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_are_rounded_once(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "PIECE_BYTES", 4096)
    file, raw = file_with(tmp_path / "x.gguf", kind, (33, 256))
    out = torch.empty(33, 256, dtype=dtype)
    with file.open() as data:
        fill_dense(data, file.tensors["w"], out, offset=-1.0)
    values = raw if kind in ("F16", "F32") else dequantize(raw, GGMLQuantizationType[kind])
    assert torch.equal(out, (torch.from_numpy(values.astype(np.float32)) - 1).to(dtype))


def test_bf16_tensors(tmp_path: Path) -> None:
    values = torch.randn(8, 64).bfloat16()
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", values.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "x.gguf")
    out = torch.empty(8, 64, dtype=torch.bfloat16)
    with file.open() as data:
        fill_dense(data, file.tensors["w"], out)
    assert packing_of(file.tensors["w"]) is None and torch.equal(out, values)


def test_vectors_and_stacks_are_not_packed(tmp_path: Path) -> None:
    for shape in ((256,), (2, 4, 256)):
        file, _ = file_with(tmp_path / "x.gguf", "Q8_0", shape)
        assert packing_of(file.tensors["w"]) is None
