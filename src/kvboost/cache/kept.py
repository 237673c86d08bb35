"""What stays on this machine between starts, and removing it. Knows no torch."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
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
    """Everything, the largest first. What cannot be read is passed over."""
    found = []
    for directory, kind in KINDS.items():
        root = cache_path(directory)
        if directory == "layers":
            found += [_described(path, kind, _name(path)) for path in _directories(root)]
        elif root.is_dir() and not root.is_symlink():
            found.append(_described(root, kind, f"{sum(1 for _ in _files(root))} files"))
    return sorted(found, key=lambda item: -item.nbytes)


def remove(item: Kept) -> None:
    """A model that reads these layers now keeps what it has open; the next start writes them again. Raises OSError."""
    shutil.rmtree(item.path)


def _described(path: Path, kind: str, name: str) -> Kept:
    stats = [file.lstat() for file in _files(path)]
    used = max((status.st_mtime for status in (*stats, path.lstat())), default=0.0)
    return Kept(kind, name, path, sum(status.st_size for status in stats), used)


def _directories(root: Path) -> Iterator[Path]:
    try:
        yield from (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return


def _files(path: Path) -> Iterator[Path]:
    try:
        for file in path.iterdir():
            if stat.S_ISREG(file.lstat().st_mode):
                yield file
    except OSError:
        return


def _name(path: Path) -> str:
    """As it was written there, without what a terminal would take for commands."""
    try:
        with open(path / NAME_FILE, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_NAME)
    except OSError:
        return "unknown"
    return "".join(c for c in text if c.isprintable()).strip() or "unknown"
