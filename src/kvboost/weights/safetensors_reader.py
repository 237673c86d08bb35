"""Reads the safetensors files of a model directory. What a file says is believed only after it was checked against the
file itself: nothing is allocated from a number in a header before that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvboost.errors import ModelLoadError

HEADER_LIMIT_BYTES = 32 << 20
"""Of one file's header, and of an index. 100,000 tensors take 15 MB; the format's own limit (100 MB) would let a hostile
header grow to a gigabyte of Python objects."""

MAX_TENSORS_IN_FILE = 250_000
MAX_DIMENSIONS = 8

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` and `nbytes` are inside `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"


class TensorFiles(Mapping[str, StoredTensor]):
    """The tensors of a model directory by name. Every entry lies wholly inside its file, and no two overlap."""

    def __init__(self, directory: Path, tensors: dict[str, StoredTensor]) -> None:
        self.directory = directory
        self._tensors = tensors

    @classmethod
    def open(cls, directory: str | Path) -> TensorFiles:
        """Read the headers only. Raises `ModelLoadError` naming the file and the tensor at fault."""
        directory = Path(directory)
        tensors: dict[str, StoredTensor] = {}
        files, listed = _weight_files(directory)
        for file in files:
            for tensor in read_header(file):
                if tensor.name in tensors:
                    raise ModelLoadError(f"{tensor} is in {tensors[tensor.name].file.name} too. Download it again.")
                tensors[tensor.name] = tensor
        for name, file_name in listed.items():
            if name not in tensors or tensors[name].file.name != file_name:
                raise ModelLoadError(
                    f"{directory / INDEX}: tensor {name!r} should be in {file_name}, but is not. Download it again."
                )
        return cls(directory, tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """The tensor, or its rows from `start` to `end`, in memory of its own. Raises `ModelLoadError`."""
        tensor = self._tensors[name]
        shape = tensor.shape
        if not shape:
            return _read_bytes(tensor, tensor.offset, tensor.nbytes).view(tensor.dtype).view(())
        end = shape[0] if end is None else min(end, shape[0])
        row = tensor.nbytes // shape[0] if shape[0] else 0
        raw = _read_bytes(tensor, tensor.offset + start * row, (end - start) * row)
        return raw.view(tensor.dtype).view(end - start, *shape[1:])


def _read_bytes(tensor: StoredTensor, offset: int, count: int) -> Tensor:
    # Not mapped: a file that shrinks while it is read must be an error, not a SIGBUS.
    out = torch.empty(count, dtype=torch.uint8)
    view = memoryview(out.numpy())  # type: ignore[arg-type]
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < count:
                got = file.readinto(view[done : done + (1 << 30)])
                if not got:
                    raise ModelLoadError(f"{tensor}: the file ended early. Download it again.")
                done += got
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(f"{tensor}: could not be read ({error}).") from error
    return out


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Files to read, and what the index (where there is one) says is in which."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return [single], {}
    if index.is_file():
        listed = read_index(index)
        files = [directory / name for name in sorted(set(listed.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelLoadError(f"{directory}: {len(absent)} weight files are missing, {absent[0]} for one.")
        return files, listed
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:  # GPTQ checkpoints often have one file of another name
        found = f"{len(files)} *.safetensors files and no index" if files else "no *.safetensors file"
        raise ModelLoadError(f"{directory}: {found}. Download the checkpoint completely.")
    return files, {}


def read_index(index: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name to file name. Raises `ModelLoadError`."""
    try:
        if index.stat().st_size > HEADER_LIMIT_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        listed = _parse(index.read_bytes())["weight_map"]
        for name, file in listed.items():
            if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
                raise ValueError(f"{name!r} is in {file!r}, which is not the name of a file beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{index}: damaged ({_short(error)}). Download it again.") from error
    return dict(listed)


def read_header(file: Path) -> list[StoredTensor]:
    """All tensors of one file, checked: they fill the file without gaps or overlaps. Raises `ModelLoadError`."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelLoadError(f"{file}: truncated or not a safetensors file ({size} bytes). Download it again.")
            if length > HEADER_LIMIT_BYTES:
                raise ModelLoadError(f"{file}: a header of {length} bytes; at most {HEADER_LIMIT_BYTES} are read.")
            raw = handle.read(length)
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{file}: could not be read ({error}).") from error
    try:
        header = _parse(raw)
        header.pop("__metadata__", None)
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{file}: its header is damaged ({_short(error)}). Download it again.") from error
    tensors = [_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    at = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            raise ModelLoadError(
                f"{tensor} begins at byte {tensor.offset}, where {at} is expected: it overlaps another, or there is a gap. "
                "Download it again."
            )
        at += tensor.nbytes
    if at != size:
        raise ModelLoadError(f"{file}: {size} bytes, but its header describes {at}. Download it again.")
    return tensors


def _parse(raw: bytes) -> dict[str, Any]:
    """JSON whose objects can only be as many and as large as headers need. Raises `ValueError`, `RecursionError`."""
    objects = raw.count(b"{")
    values = 16 * objects + 100_000  # of a tensor at most 13 with commas between; free-form metadata has some too
    if objects > MAX_TENSORS_IN_FILE or raw.count(b"[") > 2 * objects + 1000 or raw.count(b",") > values:
        raise ValueError("more objects, lists or values than tensors need")
    parsed = json.loads(raw, object_pairs_hook=_unique)
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(file: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        if len(shape) > MAX_DIMENSIONS or any(type(x) is not int or x < 0 for x in numbers):
            raise ValueError("its shape and offsets must be whole numbers from 0")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"shape {shape} in {entry['dtype']} does not take {end - begin} bytes")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelLoadError(
            f"{file}: tensor {name[:200]!r} is damaged ({_short(error)}). Download it again."
        ) from error
    return StoredTensor(name, file, dtype, tuple(shape), base + begin, end - begin)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
