"""Reads GGUF files that nobody vouches for: every count, length, offset and size is checked before it is believed.

Nothing is allocated for a number in the file before that number has been compared with the bytes that are left, so
reading takes memory of the order of the file's header. Tensor data is read on demand; the file is never mapped, so
that one cut short meanwhile is an error and not a SIGBUS.

Layout (versions 2 and 3, little-endian): `GGUF`, version u32, tensor count u64, metadata count u64; the metadata, each
key, type u32, value; the tensor infos, each name, dimension count u32, dimensions u64 (fastest first), type u32, offset
u64; zeros up to the alignment; the data.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvboost.errors import ModelLoadError
from kvboost.weights.gguf_cursor import Cursor, damaged
from kvboost.weights.gguf_types import TYPES, TensorType

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_NAME_BYTES = 65_535
"""Of a key or a tensor's name: the format's own limit."""

MAX_ITEMS = 1 << 17
"""Tensors, or metadata: 100 times what the largest models have; Python needs about 600 bytes for each."""

MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
"""Types of single values, by their number in the file."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. shape: slowest dimension first, as in torch. offset: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """What a file says about itself. metadata: text, numbers, booleans, lists of text, and arrays of numbers as numpy
    arrays. value_types: the file's own type of each value; an array's is that of its elements."""

    path: Path
    metadata: dict[str, Any]
    value_types: dict[str, int]
    tensors: dict[str, TensorInfo]
    size: int
    version: int
    _stamp: tuple[int, int] = field(repr=False, default=(0, 0))

    def text(self, key: str) -> str:
        """A value that must be there and be text. Raises `ModelLoadError`."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or not value:
            damaged(self.path, key, f"is {'missing' if value is None else repr(value)[:60]}; it must be text")
        return value

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @contextmanager
    def open(self) -> Iterator[TensorData]:
        """The file's tensor data. Raises `ModelLoadError` when it is no longer the file that was checked."""
        with _opened(self.path) as handle:
            state = os.fstat(handle.fileno())
            if (state.st_size, state.st_mtime_ns) != self._stamp:
                raise ModelLoadError(f"{self.path}: the file has changed since it was opened. Load it again.")
            yield TensorData(self, handle)


class TensorData:
    """An open file: reads whole rows of tensors, for one thread at a time."""

    def __init__(self, file: GGUFFile, handle: FileIO) -> None:
        self._file, self._handle = file, handle

    def rows(self, info: TensorInfo, start: int, out: Bytes) -> Bytes:
        """Fill `out[rows, info.row_bytes]` (contiguous) with the rows from `start` on."""
        view = memoryview(out.reshape(-1).data)
        self._handle.seek(info.offset + start * info.row_bytes)
        while view:
            count = self._handle.readinto(view)
            if not count:
                raise ModelLoadError(f"{self._file.path}: tensor {info.name!r} ends early. Download the file again.")
            view = view[count:]
        return out

    def whole(self, info: TensorInfo) -> Bytes:
        """`[rows, row_bytes]`."""
        return self.rows(info, 0, np.empty((info.rows, info.row_bytes), np.uint8))


def read_gguf(path: str | Path) -> GGUFFile:
    """Check a file's header as a whole. Raises `ModelLoadError` naming the field or tensor at fault."""
    path = Path(path)
    with _opened(path) as handle:
        state = os.fstat(handle.fileno())
        cursor = Cursor(path, handle, state.st_size)
        version, tensor_count, pair_count = _read_start(cursor)
        metadata, types = _read_metadata(cursor, pair_count)
        tensors = _read_tensors(cursor, tensor_count, _alignment(path, metadata))
    return GGUFFile(path, metadata, types, tensors, state.st_size, version, (state.st_size, state.st_mtime_ns))


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    try:
        handle = FileIO(path)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}).") from error
    with handle:
        yield handle


def _read_start(cursor: Cursor) -> tuple[int, int, int]:
    path = cursor.path
    if cursor.size < 24 or cursor.take(4, "the file") != b"GGUF":
        raise ModelLoadError(f"{path}: not a GGUF file (wrong magic bytes or too short). Download it again.")
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        kind = "it is big-endian" if version & 0xFFFF == 0 else f"it is version {version}"
        raise ModelLoadError(
            f"{path}: {kind}; GGUF versions 2 and 3, little-endian, are read. Convert the model again."
        )
    tensors, pairs = cursor.number("<Q", "tensor_count"), cursor.number("<Q", "metadata count")
    for what, count, least in (("tensor_count", tensors, 8 + 4 + 8 + 4 + 8), ("metadata count", pairs, 8 + 4 + 1)):
        most = min(MAX_ITEMS, cursor.left // least)
        if count > most:
            damaged(path, what, f"is {count}, but {most} at most fit here")
    return version, tensors, pairs


def _read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Any], dict[str, int]]:
    metadata: dict[str, Any] = {}
    types: dict[str, int] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
        if key in metadata:
            damaged(cursor.path, f"metadata key {key!r}", "is there twice")
        kind = cursor.number("<I", f"the type of {key}")
        if kind == ARRAY:
            kind = cursor.number("<I", f"the element type of {key}")
            length = cursor.number("<Q", f"the length of {key}")
            metadata[key] = _read_array(cursor, key, kind, length)
        else:
            metadata[key] = cursor.string(key) if kind == STRING else _read_scalars(cursor, key, kind, 1)[0].item()
        types[key] = kind
    return metadata, types


def _read_array(cursor: Cursor, key: str, kind: int, length: int) -> Any:
    if kind == ARRAY:
        damaged(cursor.path, key, "is an array of arrays, which no model needs")
    return cursor.strings(length, key) if kind == STRING else _read_scalars(cursor, key, kind, length)


def _read_scalars(cursor: Cursor, key: str, kind: int, count: int) -> np.ndarray[Any, Any]:
    if kind not in SCALARS:
        damaged(cursor.path, key, f"has the unknown type {kind}")
    raw = np.frombuffer(cursor.take(count * SCALARS[kind].itemsize, key), np.uint8)
    if kind == 7 and raw.size and raw.max() > 1:
        damaged(cursor.path, key, f"is a boolean of {raw.max()}")
    return raw.view(SCALARS[kind])


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        damaged(path, "general.alignment", f"is {alignment!r}; it must be a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: list[TensorInfo] = []
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        found.append(_read_tensor(cursor, name, alignment))
    data_at = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        if info.name in tensors:
            damaged(cursor.path, f"tensor {info.name!r}", "is there twice")
        placed = TensorInfo(info.name, info.shape, info.type, data_at + info.offset)
        if placed.offset + placed.nbytes > cursor.size:
            damaged(
                cursor.path, f"tensor {info.name!r}",
                f"lies at bytes {placed.offset} to {placed.offset + placed.nbytes}, but the file has {cursor.size}",
            )  # fmt: skip
        tensors[info.name] = placed
    _refuse_overlaps(cursor.path, tensors)
    return tensors


def _read_tensor(cursor: Cursor, name: str, alignment: int) -> TensorInfo:
    """The info as it stands in the file: its offset is from the start of the data."""
    path, what = cursor.path, f"tensor {name!r}"
    count = cursor.number("<I", f"the dimension count of {what}")
    if not 1 <= count <= MAX_DIMENSIONS:
        damaged(path, what, f"has {count} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = struct.unpack(f"<{count}Q", cursor.take(8 * count, f"the dimensions of {what}"))[::-1]
    kind, offset = cursor.number("<I", f"the type of {what}"), cursor.number("<Q", f"the offset of {what}")
    if kind not in TYPES:
        damaged(path, what, f"has the unknown type {kind}")
    info = TensorInfo(name, shape, TYPES[kind], offset)
    if min(shape) < 1 or shape[-1] % info.type.block:
        damaged(path, what, f"has shape {list(shape)}; {info.type.name} rows are multiples of {info.type.block}")
    if info.nbytes > cursor.size or offset > cursor.size:
        damaged(path, what, f"has {info.nbytes} bytes at offset {offset}, but the file has {cursor.size}")
    if offset % alignment:
        damaged(path, what, f"has the offset {offset}, which is not a multiple of {alignment}")
    return info


def _refuse_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            damaged(path, f"tensor {after.name!r}", f"overlaps {before.name!r}")
