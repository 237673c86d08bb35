"""Files from anywhere: each is read as what it is, or refused with the file and the tensor named; never more memory than
the file itself accounts for."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import packed_checkpoints as made
from kvboost.errors import ModelLoadError
from kvboost.weights.checkpoint import load_packed_checkpoint
from kvboost.weights.safetensors_reader import HEADER_LIMIT_BYTES, TensorFiles, read_header

CPU = torch.device("cpu")


def write_raw(file: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(7, 5), "b": torch.randn(3, 4).bfloat16(), "c": torch.arange(6, dtype=torch.int32),
        "d": torch.randn(4, 4).to(torch.float8_e4m3fn), "e": torch.tensor(2.5), "f": torch.zeros(0, 3),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "note": "with, commas [and] {braces}"})
    files = TensorFiles.open(tmp_path)
    assert set(files) == set(tensors)
    for name, tensor in tensors.items():
        got = files.read(name)
        assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8) if got.ndim else got, tensor.view(torch.uint8) if got.ndim else tensor)  # fmt: skip
    assert torch.equal(files.read("a", 2, 5), tensors["a"][2:5])


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, file)
    files = TensorFiles.open(tmp_path)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelLoadError, match=r"'a'.*ended early"):
        files.read("a")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

LIES: dict[str, tuple[Any, str]] = {
    "offsets beyond the file": ({"a": {**ENTRY, "shape": [2**40], "data_offsets": [0, 2**42]}}, "header describes"),
    "shape and bytes differ": ({"a": {**ENTRY, "shape": [3]}}, "'a'.*does not take 8 bytes"),
    "negative": ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, "'a'.*whole numbers"),
    "backwards": ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "'a'"),
    "true as a number": ({"a": {**ENTRY, "shape": [True, 2]}}, "'a'.*whole numbers"),
    "a fraction": ({"a": {**ENTRY, "shape": [2.0]}}, "'a'.*whole numbers"),
    "overflow": ({"a": {**ENTRY, "shape": [2**62, 2**62]}}, "'a'"),
    "many dimensions": ({"a": {**ENTRY, "shape": [1] * 50}}, "'a'"),
    "overlap": ({"a": ENTRY, "b": ENTRY}, "overlaps"),
    "gap": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, "gap"),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "F4"}}, "'a'.*F4"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "'a'.*dtype"),
    "a list": ([1, 2], "damaged"),
    "entry is a number": ({"a": 3}, "'a'"),
    "data left over": ({}, "header describes"),
}


@pytest.mark.parametrize("what", LIES)
def test_headers_that_lie_are_refused_by_name(what: str, tmp_path: Path) -> None:
    header, message = LIES[what]
    file = tmp_path / "model.safetensors"
    write_raw(file, json.dumps(header).encode(), bytes(8))
    with pytest.raises(ModelLoadError, match=message) as caught:
        TensorFiles.open(tmp_path)
    assert str(file) in str(caught.value)


BOMBS: dict[str, Callable[[], bytes]] = {
    "nested": lambda: b'{"a":' * 100_000,
    "nested lists": lambda: b'{"a":' + b"[" * 900,
    "empty lists": lambda: b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    "empty objects": lambda: b'{"a":[' + b"{}," * 3_000_000 + b"{}]}",
    "numbers": lambda: b'{"a":[' + b"999," * 3_000_000 + b"1]}",
    "a long number": lambda: b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,8]}}',
    "the same name": lambda: b"{" + b'"a":{},' * 30_000 + b'"a":{}}',
    "not UTF-8": lambda: b'{"\xff\xfe":{}}',
}


@pytest.mark.parametrize("what", BOMBS)
def test_json_bombs_cost_little_memory(what: str, tmp_path: Path) -> None:
    raw = BOMBS[what]()
    write_raw(tmp_path / "model.safetensors", raw, bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError):
            TensorFiles.open(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(raw) + (4 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [2**63, 2**40, HEADER_LIMIT_BYTES + 1, 100])
def test_the_length_of_a_header_is_checked_first(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", length) + b"{}")
        if length == HEADER_LIMIT_BYTES + 1:
            handle.truncate(length + 100)  # sparse: the file is as long as it says
    with pytest.raises(ModelLoadError, match=r"truncated|at most"):
        read_header(file)


INDEXES: dict[str, Any] = {
    "elsewhere": {"weight_map": {"a": "../../etc/x.safetensors"}},
    "absolute": {"weight_map": {"a": "/tmp/x.safetensors"}},
    "no file name": {"weight_map": {"a": 5}},
    "no map": {"metadata": {}},
    "a list": {"weight_map": ["a"]},
    "missing file": {"weight_map": {"a": "other.safetensors"}},
    "wrong file": {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}},
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_may_only_name_files_beside_it(what: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(INDEXES[what]))
    with pytest.raises(ModelLoadError):
        TensorFiles.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(2), name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="'a'"):
        TensorFiles.open(tmp_path)


# -- fuzz ------------------------------------------------------------------------------------------------------------

ABSURD = (-1, 0, 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 0.5, None, "x", [], {})


def flip(raw: bytearray, rng: random.Random) -> bytes:
    header = int.from_bytes(raw[:8], "little")
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(8 + header) if rng.random() < 0.8 else rng.randrange(len(raw))
        raw[at] ^= 1 << rng.randrange(8)
    return bytes(raw)


def cut(raw: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return bytes(raw[:at]) + (rng.randbytes(rng.randrange(64)) if rng.random() < 0.5 else b"")


def lie(raw: bytearray, rng: random.Random) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(names)
        kind = rng.randrange(6)
        entry = header[name]
        if not isinstance(entry, dict):
            continue
        if kind == 0:
            entry["shape"] = [rng.choice(ABSURD) for _ in range(rng.randrange(4))]
        elif kind == 1:
            entry["data_offsets"] = [rng.choice(ABSURD), rng.choice(ABSURD)]
        elif kind == 2:
            entry["dtype"] = rng.choice(["F64", "F16", "I8", "BOOL", "F8_E5M2", "", None, 7])
        elif kind == 3:
            other = rng.choice(names)
            header[name], header[other] = header[other], header[name]
        elif kind == 4:
            header[name] = rng.choice(ABSURD)
        else:
            header[name[: rng.randrange(len(name))] + "?"] = header.pop(name)
            names.remove(name)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(raw[8 + length :])


def resize(raw: bytearray, rng: random.Random) -> bytes:
    raw[:8] = struct.pack("<Q", rng.choice([0, 1, 7, len(raw), len(raw) - 8, 2**31, 2**63, rng.randrange(len(raw))]))
    return bytes(raw)


@pytest.mark.parametrize("name", ["awq-g32", "gptq-4-asymmetric", "ct-4-asymmetric", "fp8-blocks", "ct-int8"])
def test_fuzzed_checkpoints_load_or_are_refused(name: str, tmp_path: Path) -> None:
    """60 mutations of each format: 300 files."""
    made.write(tmp_path, made.tiny(num_hidden_layers=1, vocab_size=64), *made.FORMATS[name])
    config, file = made.config_of(tmp_path), tmp_path / "model.safetensors"
    original = file.read_bytes()
    rng = random.Random(name)
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(60):
            file.write_bytes(rng.choice([flip, cut, lie, resize])(bytearray(original), rng))
            try:
                model = load_packed_checkpoint(tmp_path, config, torch.float32, CPU)
                assert model is not None and not any(p.is_meta for p in model.parameters())
            except ModelLoadError as error:
                assert str(tmp_path) in str(error)
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert refused > 30
    file.write_bytes(original)
    assert load_packed_checkpoint(tmp_path, config, torch.float32, CPU) is not None
    assert load_file(file)
