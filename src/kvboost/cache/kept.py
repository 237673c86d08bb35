"""What stays on this machine between starts, and removing it. Knows no torch."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvboost.cache.private import cache_path

KINDS = {"layers": "streamed layers", "native": "CPU kernels", "cuda": "CUDA kernels"}
"""Directories of the cache, and what is in them. Each model's layers have a directory of their own."""

NAME_FILE = "model"
"""In a directory of layers: whose they are, in one line."""

MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Kept:
    """`nbytes` in files below `path`; `used`: when one of them was last written or its directory last opened, seconds since
    1970."""

    kind: str
    name: str
    path: Path
    nbytes: int
    used: float


def kept() -> list[Kept]:
    """Everything, the largest first. What cannot be read, or goes meanwhile, is passed over."""
    found = []
    for directory, kind in KINDS.items():
        root = cache_path(directory)
        for path in _entries(root) if directory == "layers" else (root,):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    files = _files(path)
                    name = _name(path) if directory == "layers" else f"{len(files)} files"
                    used = max(file.st_mtime for file in (status, *files))
                    found.append(Kept(kind, name, path, sum(file.st_size for file in files), used))
    return sorted(found, key=lambda item: -item.nbytes)


def remove(item: Kept) -> None:
    """A model that reads these layers now keeps what it has open; the next start writes them again. Raises OSError."""
    shutil.rmtree(item.path)


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _files(path: Path) -> list[os.stat_result]:
    """Of a directory, without links and what they name."""
    found = []
    for file in _entries(path):
        with suppress(OSError):
            found.append(file.lstat())
    return [status for status in found if stat.S_ISREG(status.st_mode)]


def _name(path: Path) -> str:
    """As it was written there, without what a terminal would take for commands."""
    try:
        with open(path / NAME_FILE, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_NAME)
    except OSError:
        return "unknown"
    return "".join(c for c in text if c.isprintable()).strip() or "unknown"
