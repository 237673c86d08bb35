"""Streamed layers in files: written once, read in every sweep past the page cache, by several threads.

A file is a header of 4 KiB and the layer's bytes. The header says what the bytes must be (see `_header`) and carries a
checksum of itself; files are written to a temporary name and renamed. Whatever does not match is written again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from kvboost.cache.kept import MAX_NAME, NAME_FILE
from kvboost.cache.pages import zeroed_buffer
from kvboost.cache.private import CACHE_VARIABLE, cache_path, make_private
from kvboost.errors import ConfigError, ModelLoadError

HEADER_BYTES = 4096
"""Also what offsets, lengths and addresses are multiples of when the page cache is bypassed."""

MAGIC = b"KVBL0001"
DIGEST_BYTES = 16

READERS = 4
"""Threads that read one layer together: NVMe drives need some requests in flight."""

PIECE_BYTES = 8 << 20
"""Read by one thread at a time."""

PROBE_BYTES = 64 << 20
"""Written and read to measure a drive."""

BUDGET = "weights_budget_gib"


def cache_directory() -> Path:
    """`kvboost/layers` in `$KVBOOST_CACHE_DIR`, else in the user's cache directory. Made, with mode 0700, when it is not
    there.

    Raises `ConfigError` when it cannot be made, or when others can write to it.
    """
    path = cache_path("layers")
    _make_private(path)
    return path


def _make_private(path: Path) -> None:
    if not hasattr(os, "preadv"):
        raise ConfigError(
            BUDGET, "this system cannot read files the way streaming from disk needs (Linux and macOS can)."
        )
    try:
        private = make_private(path)
    except OSError as error:
        raise ConfigError(CACHE_VARIABLE, f"{path}: {error.strerror}. Give a directory that can be written.") from error
    if not private:
        raise ConfigError(
            CACHE_VARIABLE,
            f"{path} belongs to or can be written by others. Run `chmod 700 {path}`, or give another directory.",
        )


class DiskStore:
    """Layers in `directory`, one file each; `sizes` are their bytes. key: what makes these weights these weights. name: of
    the model, for people.

    A layer must be `write`ten, or be found by `holds`, before it is read.
    """

    def __init__(self, directory: Path, key: str, sizes: Sequence[int], name: str = "unknown") -> None:
        self._key, self._sizes = key, tuple(sizes)
        self.directory = directory / blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()
        _make_private(self.directory)
        # For `kvboost cache`, which also sees by it when the layers were last used.
        with suppress(OSError), os.fdopen(_created(self.directory / NAME_FILE), "wb") as file:
            file.write(name[:MAX_NAME].encode(errors="replace"))
        for old in self.directory.glob("*.tmp-*"):  # of processes that ended while they wrote
            if not _alive(old.name.rpartition("-")[2]):
                with suppress(OSError):
                    old.unlink()
        self._files: dict[int, _LayerFile] = {}
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="kvboost-read")

    def path(self, layer: int) -> Path:
        return self.directory / f"layer-{layer:04d}.kvl"

    def holds(self, layer: int, data_digest: str | None = None) -> bool:
        """Whether the layer's file is whole and right; with `data_digest`, whether it holds those bytes."""
        try:
            file = _LayerFile(self.path(layer))
        except OSError:
            return False
        try:
            found = _header_fields(file.header(), self._key, layer, self._sizes[layer])
            if found is None or data_digest not in (None, found) or self._digest_of(file, layer) != found:
                file.close()
                return False
        except OSError:
            file.close()
            return False
        self._replace(layer, file)
        return True

    def missing(self, layers: Sequence[int]) -> list[int]:
        """Those of `layers` whose files are not there or not right. Each file is read, several at a time."""
        with ThreadPoolExecutor(READERS) as pool:
            return [layer for layer, held in zip(layers, pool.map(self.holds, layers), strict=True) if not held]

    def write(self, layer: int, buffer: Tensor) -> None:
        """Store the beginning of `buffer`, uint8 on the CPU; a file that holds the same bytes is kept."""
        data = _bytes_of(buffer)[: self._sizes[layer]]
        digest = blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
        if self.holds(layer, digest):
            return
        path = self.path(layer)
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        padding = bytes(_padded(len(data)) - len(data))
        try:
            with os.fdopen(_created(temporary), "wb", buffering=0) as file:
                for part in (_header(self._key, layer, len(data), digest), data, padding):
                    _write_all(file.fileno(), part)
                os.fsync(file.fileno())
                _drop_cached(file.fileno())
            os.replace(temporary, path)
            self._replace(layer, _LayerFile(path))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise ModelLoadError(
                f"{path}: the layer could not be written ({error.strerror}). Make room, or set {CACHE_VARIABLE}."
            ) from error

    def require_room(self, missing: Sequence[int]) -> None:
        """Raise `ConfigError` when the drive has no room for the layers `missing`."""
        need = sum(_padded(self._sizes[i]) + HEADER_BYTES for i in missing)
        free = shutil.disk_usage(self.directory).free
        if need > free:
            raise ConfigError(
                CACHE_VARIABLE,
                f"the streamed layers take {need / 2**30:.1f} GiB; {self.directory} has {free / 2**30:.1f} GiB. "
                "Make room (`kvboost cache` shows what other models left), or give a directory on another drive.",
            )

    def read_into(self, layer: int, out: Tensor) -> None:
        """Fill `out` with the layer; it must have room for whole 4 KiB pages. Raises `ModelLoadError`."""
        size = _padded(self._sizes[layer])
        memory = _bytes_of(out)[:size]
        if len(memory) < size:
            raise ValueError(f"a buffer of {out.numel()} bytes has no room for {size}.")
        file = self._files[layer]
        pieces = [(at, memory[at : at + PIECE_BYTES]) for at in range(0, size, PIECE_BYTES)]
        try:
            for _ in self._pool.map(lambda piece: file.read(HEADER_BYTES + piece[0], piece[1]), pieces):
                pass
        except OSError as error:
            raise ModelLoadError(
                f"{self.path(layer)}: could not be read ({error}). Load the model again: the file will be rebuilt."
            ) from error

    def close(self) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _replace(self, layer: int, file: _LayerFile) -> None:
        old, self._files[layer] = self._files.get(layer), file
        if old is not None:
            old.close()

    def _digest_of(self, file: _LayerFile, layer: int) -> str:
        digest, left, at = blake2b(digest_size=DIGEST_BYTES), self._sizes[layer], HEADER_BYTES
        memory = _bytes_of(zeroed_buffer(PIECE_BYTES))
        while left > 0:
            file.read(at, memory[: _padded(min(left, PIECE_BYTES))])
            digest.update(memory[: min(left, PIECE_BYTES)])
            left, at = left - PIECE_BYTES, at + PIECE_BYTES
        return digest.hexdigest()


class _LayerFile:
    """An open layer file, read past the page cache where the file system allows it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.direct = hasattr(os, "O_DIRECT")
        if self.direct:
            try:
                self._handle = os.open(path, os.O_RDONLY | os.O_DIRECT | _flag("O_NOFOLLOW"))
                os.preadv(self._handle, [_bytes_of(zeroed_buffer(HEADER_BYTES))], 0)
                return
            except FileNotFoundError:
                raise
            except OSError:  # tmpfs, some network file systems
                if hasattr(self, "_handle"):
                    os.close(self._handle)
                self.direct = False
        self._handle = os.open(path, os.O_RDONLY | _flag("O_NOFOLLOW"))

    def header(self) -> bytes:
        memory = zeroed_buffer(HEADER_BYTES)
        self.read(0, _bytes_of(memory))
        return memory.numpy().tobytes()

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory`; its address and size are multiples of 4 KiB. Raises `OSError` at the end of the file."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._handle, [memory[done:]], offset + done)
            if count <= 0:
                raise OSError(f"the file ends at {offset + done} bytes")
            done += count

    def close(self) -> None:
        os.close(self._handle)


def _header(key: str, layer: int, nbytes: int, data_digest: str) -> bytes:
    fields = {"key": key, "layer": layer, "nbytes": nbytes, "data": data_digest}
    body = (MAGIC + json.dumps(fields).encode()).ljust(HEADER_BYTES - DIGEST_BYTES, b"\0")
    if len(body) > HEADER_BYTES - DIGEST_BYTES:
        raise ValueError(f"a key of {len(key)} characters does not fit the header.")
    return body + blake2b(body, digest_size=DIGEST_BYTES).digest()


def _header_fields(header: bytes, key: str, layer: int, nbytes: int) -> str | None:
    """The digest of the data, when the header is whole and of this layer."""
    try:
        fields = json.loads(header[len(MAGIC) : -DIGEST_BYTES].rstrip(b"\0"))
        digest = str(fields["data"])
    except (ValueError, KeyError, TypeError):
        return None
    return digest if header == _header(key, layer, nbytes, digest) else None


def measure_disk(directory: Path) -> float:
    """Bytes per second at which files of `directory` are read past the page cache."""
    buffer = zeroed_buffer(PROBE_BYTES)
    key = f"probe-{os.getpid()}"
    buffer.numpy()[:: HEADER_BYTES // 2] = 1  # drives and file systems may skip zeros
    store = DiskStore(directory, key, [PROBE_BYTES])
    try:
        store.require_room([0])
        store.write(0, buffer)
        began = time.perf_counter()
        store.read_into(0, buffer)
        return PROBE_BYTES / (time.perf_counter() - began)
    finally:
        store.close()
        shutil.rmtree(store.directory, ignore_errors=True)


def _bytes_of(buffer: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the CPU; it keeps the tensor's memory alive."""
    numbers: Any = buffer.numpy()
    return memoryview(numbers)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(handle, view[: 1 << 30]) :]


def _drop_cached(handle: int) -> None:
    """What was written will be read past the page cache: the cache need not keep it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _padded(size: int) -> int:
    return -(-size // HEADER_BYTES) * HEADER_BYTES


def _created(path: Path) -> int:
    """A file of this user alone, empty, open for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _flag("O_NOFOLLOW"), 0o600)


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
