"""The GGUF reader: what it finds in good files, what it says about bad ones, and that neither costs memory."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from gguf_files import LAYERS, VOCABULARY, TinyFile
from kvboost.errors import ModelLoadError
from kvboost.models.loading import load_model, load_tokenizer, locate
from kvboost.weights.gguf_checks import check_sizes
from kvboost.weights.gguf_cursor import MAX_STRINGS
from kvboost.weights.gguf_reader import MAX_ITEMS, read_gguf
from kvboost.weights.gguf_types import TYPES

MEMORY_BYTES = 512 << 20
"""Address space that reading and loading a file of 1 MB may take beyond what is there: absurd sizes run into it."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = TinyFile("llama", kinds=("Q4_K", "Q6_K"), **{"general.quantization_version": 2})
    return file.write(tmp_path_factory.mktemp("gguf") / "good.gguf")


@pytest.fixture(scope="module")
def numbers(good: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of each count, length, type, dimension, offset and value in the header."""
    reader = GGUFReader(good)
    base = reader.data.__array_interface__["data"][0]
    parts = [part for field in reader.fields.values() for part in field.parts]
    parts += [part for tensor in reader.tensors for part in tensor.field.parts]
    return [(p.__array_interface__["data"][0] - base, p.nbytes) for p in parts if p.nbytes in (4, 8)]


def header_bytes(path: Path) -> int:
    return min(info.offset for info in read_gguf(path).tensors.values())


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Allocations that go far beyond the file fail here, and so does the test."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutated(raw: bytes, header: int, numbers: list[tuple[int, int]], rng: random.Random) -> bytes:
    """One of: flipped bytes, a cut, an absurd number where a number stands, a piece taken out or put in twice."""
    data = bytearray(raw)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(header)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind in (2, 3):
        at, size = rng.choice(numbers)
        absurd = rng.choice((0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1))
        data[at : at + size] = (absurd % 256**size).to_bytes(size, "little")
    else:
        start = rng.randrange(header)
        piece = data[start : start + rng.randint(1, 64)]
        data[start : start + (len(piece) if rng.random() < 0.5 else 0)] = piece if rng.random() < 0.5 else b""
    return bytes(data)


def load(path: Path) -> None:
    source = locate(path)
    model = load_model(source, "float32", torch.device("cpu"))
    load_tokenizer(source)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)


def outcomes(
    good: Path, numbers: list[tuple[int, int]], path: Path, seeds: range, attempt: Any
) -> tuple[int, list[str]]:
    """(how many mutated files were taken, what was said about the others). Other errors, and memory, go through."""
    raw, header = good.read_bytes(), header_bytes(good)
    taken, refused = 0, []
    with bounded_memory():
        for seed in seeds:
            path.write_bytes(mutated(raw, header, numbers, random.Random(seed)))
            try:
                attempt(path)
                taken += 1
            except ModelLoadError as error:
                refused.append(str(error))
    return taken, refused


def test_1000_damaged_files_are_read_or_refused(good: Path, numbers: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    taken, refused = outcomes(good, numbers, path, range(1000), lambda p: check_sizes(read_gguf(p)))
    assert taken + len(refused) == 1000 and min(taken, len(refused)) > 150
    assert all(str(path) in message for message in refused)


@pytest.mark.parametrize("part", range(5))
def test_500_damaged_files_are_loaded_or_refused(
    part: int, good: Path, numbers: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Through config, weights, tokenizer and a call of the model."""
    load(good)  # what is imported on the way is not the files' memory
    taken, refused = outcomes(good, numbers, tmp_path / "x.gguf", range(100 * part, 100 * part + 100), load)
    assert taken + len(refused) == 100 and min(taken, len(refused)) > 10


# -- one damage at a time: the message names what is wrong --------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 4096,
    version: int = 3,
    tensor_count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    pairs = [pair("general.architecture", 8, text("llama"))] if pairs is None else pairs
    tensors = [tensor()] if tensors is None else tensors
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


STRING_ARRAY = struct.pack("<I", 8)
HUGE = 2**63

BAD = {
    "magic": (b"GGML" + whole()[4:], "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "big-endian": (whole(version=3 << 24), "big-endian"),
    "version": (whole(version=1), "it is version 1"),
    "tensor count": (whole(tensor_count=HUGE), f"tensor_count is {HUGE}"),
    "pair count": (whole(pair_count=HUGE), f"metadata count is {HUGE}"),
    "string length": (whole([text("k") + struct.pack("<IQ", 8, HUGE)]), f"k is {HUGE} bytes long|k needs {HUGE} bytes"),
    "key length": (whole([struct.pack("<Q", 2**20)]), "metadata key 0 is 1048576 bytes long"),
    "key text": (whole([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)]), "key 0 is not UTF-8"),
    "value type": (whole([pair("k", 99, b"")]), "k has the unknown type 99"),
    "boolean": (whole([pair("k", 7, b"\x02")]), "k is a boolean of 2"),
    "key twice": (whole([pair("k", 4, bytes(4))] * 2), "'k' is there twice"),
    "array of arrays": (whole([pair("k", 9, struct.pack("<IQ", 9, 1))]), "k is an array of arrays"),
    "array length": (whole([pair("k", 9, struct.pack("<IQ", 4, HUGE))]), "k needs 3[0-9]* bytes"),
    "array of strings": (whole([pair("k", 9, STRING_ARRAY + struct.pack("<Q", HUGE))]), f"k claims {HUGE} strings"),
    "string in array": (
        whole([pair("k", 9, STRING_ARRAY + struct.pack("<QQ", 1, HUGE))]), r"k\[0\] (is|needs) 9223372036854775808"),
    "alignment": (whole([pair("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment is 48"),
    "alignment 0": (whole([pair("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment type": (whole([pair("general.alignment", 8, text("x"))]), "general.alignment is 'x'"),
    "dimensions": (whole(tensors=[tensor(shape=(1,) * 5)]), "'a' has 5 dimensions"),
    "no dimension": (whole(tensors=[tensor(shape=())]), "'a' has 0 dimensions"),
    "dimension 0": (whole(tensors=[tensor(shape=(0,))]), r"'a' has shape \[0\]"),
    "tensor size": (whole(tensors=[tensor(shape=(2**40, 2**40))]), "'a' has [0-9]* bytes at offset 0"),
    "tensor type": (whole(tensors=[tensor(kind=31)]), "'a' has the unknown type 31"),
    "part of a block": (whole(tensors=[tensor(shape=(33,), kind=2)]), "Q4_0 rows are multiples of 32"),
    "offset": (whole(tensors=[tensor(offset=2**62)]), f"at offset {2**62}"),
    "past the end": (whole(tensors=[tensor(offset=4096)]), "lies at bytes"),
    "misaligned": (whole(tensors=[tensor(offset=4)]), "not a multiple of 32"),
    "overlap": (whole(tensors=[tensor("a", (64,)), tensor("b", (64,), offset=32)]), "'b' overlaps 'a'"),
    "tensor twice": (whole(tensors=[tensor("a"), tensor("a", offset=32)]), "'a' is there twice"),
    "architecture": (whole([]), "general.architecture is missing"),
    "architecture type": (whole([pair("general.architecture", 4, bytes(4))]), "general.architecture is 0"),
    "part of a model": (
        whole([pair("general.architecture", 8, text("x")), pair("split.count", 2, struct.pack("<H", 3))]),
        "one of 3 parts of a model. Join them first"),
    "no tensors": (whole(tensors=[]), "tensor_count is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_the_error_names_the_field(name: str, tmp_path: Path) -> None:
    raw, message = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=message) as caught, bounded_memory():
        check_sizes(read_gguf(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**31), ("block_count", LAYERS + 1), ("embedding_length", 2**31), ("vocab_size", 2**31),
        ("attention.head_count", 2**32 - 1), ("rope.dimension_count", 2**31), ("context_length", 2**31), ("context_length", 0), ("attention.sliding_window", 0),
        ("attention.head_count", 0),
    ],
)  # fmt: skip
def test_sizes_that_no_tensor_bears_out_are_refused_before_anything_is_built(
    key: str, value: int, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(whole([
        pair("general.architecture", 8, text("llama")), pair(f"llama.{key}", 4, struct.pack("<I", value)),
    ], [tensor("token_embd.weight", (64, 16))] + [tensor(f"blk.{i}.x", offset=4096 + 32 * i) for i in range(LAYERS)],
        data=8192))  # fmt: skip
    with pytest.raises(ModelLoadError, match=f"llama.{key} is {value}"):
        locate(path)


def test_good_files_read_as_the_reader_of_gguf_has_them(good: Path) -> None:
    ours, theirs = read_gguf(good), GGUFReader(good)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in ours.metadata.items()} == fields
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == VOCABULARY
    with ours.open() as data:
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist())) and info.type.name == tensor.tensor_type.name
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert data.whole(info).tobytes() == tensor.data.tobytes()


def test_the_sizes_of_types_are_those_of_gguf() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, kind in TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, kind.block, kind.block_bytes) == (theirs.name, *GGML_QUANT_SIZES[theirs])


def test_strings_longer_than_the_window_of_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    long = ["é" * 700_000, "", "b" * 1_500_000, *map(str, range(1000))]
    array = STRING_ARRAY + struct.pack("<Q", len(long)) + b"".join(
        struct.pack("<Q", len(s.encode())) + s.encode() for s in long
    )  # fmt: skip
    path.write_bytes(whole([pair("k", 9, array), pair("z", 10, struct.pack("<Q", 2**64 - 1))]))
    assert read_gguf(path).metadata == {"k": long, "z": 2**64 - 1}


def test_a_file_that_changes_meanwhile_is_noticed(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(good.read_bytes())
    file = read_gguf(path)
    with file.open() as data:
        largest = max(file.tensors.values(), key=lambda info: info.offset)
        with path.open("r+b") as handle:
            handle.truncate(largest.offset + 1)
        with pytest.raises(ModelLoadError, match="ends early"):
            data.whole(largest)
    with pytest.raises(ModelLoadError, match="has changed"), file.open():
        pass


def test_many_small_things_are_bounded_too(tmp_path: Path) -> None:
    """Each costs Python far more than its bytes in the file."""
    path = tmp_path / "x.gguf"
    path.write_bytes(whole(tensors=[tensor(str(i), offset=32 * i) for i in range(MAX_ITEMS + 1)], data=0))
    with pytest.raises(ModelLoadError, match=f"tensor_count is {MAX_ITEMS + 1}, but {MAX_ITEMS} at most"):
        read_gguf(path)
    half = STRING_ARRAY + struct.pack("<Q", MAX_STRINGS // 2) + bytes(8 * (MAX_STRINGS // 2))
    path.write_bytes(whole([pair(name, 9, half) for name in "abc"]))
    with pytest.raises(ModelLoadError, match=f"c claims {MAX_STRINGS // 2} strings; 0 at most"):
        read_gguf(path)


# -- files that are sound but fit no model ------------------------------------------------------------------------------


def changed(tmp_path: Path, change: Any) -> Path:
    file = TinyFile("llama")
    change(file)
    return file.write(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.tensors.pop("blk.1.ffn_up.weight"), r"1 tensors are missing: .*up_proj.weight \(blk.1.ffn_up"),
        (lambda f: f.add("blk.1.extra.weight", (32,)), "1 tensors belong to no module of the model: blk.1.extra.weight"),
        (lambda f: f.add("blk.0.attn_v.weight", (96, 256), "Q8_0"), r"'blk.0.attn_v.weight' has shape \[96, 256\]"),
        (lambda f: f.add("output_norm.weight", (128,)), r"'output_norm.weight' has shape \[128\]"),
        (lambda f: f.add("blk.0.attn_q.weight", (256, 512), "Q4_K"), r"'blk.0.attn_q.weight' has shape \[256, 512\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_model_are_named(change: Any, message: str, tmp_path: Path) -> None:
    source = locate(str(changed(tmp_path, change)))
    with pytest.raises(ModelLoadError, match=message):
        load_model(source, "float32", torch.device("cpu"))


def test_a_token_of_absurd_length_is_refused(tmp_path: Path) -> None:
    """Cutting it into pairs of pieces would take the square of its length."""
    path, long = tmp_path / "long.gguf", "a" * 100_000
    tokens = STRING_ARRAY + struct.pack("<Q", 2) + text("b") + text(long)
    path.write_bytes(whole([pair("general.architecture", 8, text("x")), pair("tokenizer.ggml.tokens", 9, tokens)]))
    with pytest.raises(ModelLoadError, match=r"tokenizer.ggml.tokens\[1\] has 100000 characters"):
        locate(path)
