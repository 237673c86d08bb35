"""Where this machine keeps what outlives a process: compiled kernels, streamed layers. Only this user may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvboost.errors import ConfigError

CACHE_VARIABLE = "KVBOOST_CACHE_DIR"


def cache_path(name: str) -> Path:
    """`kvboost/name` in `$KVBOOST_CACHE_DIR`, else in `$XDG_CACHE_HOME`, else in `~/.cache`; not made yet.

    Raises `ConfigError` where no home directory is known."""
    root = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root).expanduser() if root else Path.home() / ".cache") / "kvboost" / name
    except RuntimeError as error:
        raise ConfigError(CACHE_VARIABLE, f"no home directory is known for {root or '~'}. Give a directory.") from error


def make_private(path: Path) -> bool:
    """Make a directory that only this user may write; whether it is one, as it may have been there. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return is_private(path)


def is_private(path: Path) -> bool:
    """Whether it belongs to this user and nobody else may write to it. Raises OSError when it is not there."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
