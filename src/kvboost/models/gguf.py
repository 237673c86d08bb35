"""Lets Transformers read a GGUF file through our checked reader: config, tokenizer, and weights that are made dense.

Its own readers trust what the file says, read it five times and decode each of its values again and again. While
`lent` is active, whoever asks for this file gets what was read once.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from kvboost.weights.gguf_reader import GGUFFile, TensorInfo

_DECODED = object()
"""Stands for the types of a value: it needs no decoding."""

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32,
          "I64": np.int64}  # fmt: skip
"""What the `gguf` package hands out as numbers; all else are bytes."""


@contextmanager
def lent(file: GGUFFile | None) -> Iterator[None]:
    """While active, Transformers gets `file` from memory; other files, and all without one, as ever."""
    if file is None:
        yield
        return
    try:
        import gguf
        from transformers import modeling_gguf_pytorch_utils as utils
    except ImportError:  # Transformers says what to install when it reads the file
        yield
        return
    patches = [
        (gguf, "GGUFReader", _reader(gguf.GGUFReader, file)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),  # asked for by each module
        (utils, "_gguf_parse_value", _parse(utils._gguf_parse_value)),
    ]
    if hasattr(utils, "tqdm") and not sys.stderr.isatty():
        patches.append((utils, "tqdm", functools.partial(utils.tqdm, disable=True)))
    patches += _metadata_readers(file)
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _reader(own: Any, file: GGUFFile) -> Any:
    def open_gguf(path: Any, *args: Any, **kwargs: Any) -> Any:
        return _View(file) if _same(path, file) and not args and not kwargs else own(path, *args, **kwargs)

    return open_gguf


def _parse(own: Any) -> Any:
    def parse(value: Any, types: Any) -> Any:
        return value if types is _DECODED else own(value, types)

    return parse


def _metadata_readers(file: GGUFFile) -> list[tuple[Any, str, Any]]:
    """From 5.24 on Transformers has a second reader, for metadata alone: (module, name, ours) wherever it is held."""
    try:
        package = importlib.import_module("transformers.integrations.gguf")
        module = importlib.import_module("transformers.integrations.gguf.reader")
        own = module.read_gguf_metadata
    except (ImportError, AttributeError):
        return []

    def read(path: Any, string_arrays: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        if not _same(path, file):
            found: tuple[dict[str, Any], tuple[str, ...]] = own(path, string_arrays)
            return found
        values = {
            key: len(value) if isinstance(value, list) and key not in string_arrays else _native(value)
            for key, value in file.metadata.items()
        }
        return values, tuple(file.tensors)

    return [(module, "read_gguf_metadata", read), (package, "read_gguf_metadata", read)]


class _View:
    """A file as `gguf.GGUFReader` shows it, as far as Transformers looks."""

    def __init__(self, file: GGUFFile) -> None:
        self.fields = {}
        for key, value in file.metadata.items():
            parts = _native(value) if isinstance(value, (list, np.ndarray)) else [value]
            self.fields[key] = SimpleNamespace(parts=parts, data=range(len(parts)), types=_DECODED)
        self.tensors = [_Tensor(file, info) for info in file.tensors.values()]


class _Tensor:
    """A tensor as the reader of `gguf` shows it; read when its data are asked for, and not kept."""

    def __init__(self, file: GGUFFile, info: TensorInfo) -> None:
        from gguf import GGMLQuantizationType

        self._file, self._info = file, info
        self.name = info.name
        self.tensor_type = GGMLQuantizationType(info.type.number)

    @property
    def data(self) -> np.ndarray[Any, Any]:
        info = self._info
        with self._file.open() as data:
            raw = data.whole(info)
        kind = _PLAIN.get(info.type.name)
        return raw.reshape(*info.shape[:-1], -1) if kind is None else raw.view(kind).reshape(info.shape)


def _native(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _same(path: Any, file: GGUFFile) -> bool:
    return Path(str(path)).absolute() == file.path.absolute()
