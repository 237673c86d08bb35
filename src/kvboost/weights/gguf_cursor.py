"""Walks through the header of a GGUF file: numbers and strings, none longer than what is left of the file."""

from __future__ import annotations

import struct
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from kvboost.errors import ModelLoadError

MAX_HEADER_BYTES = 256 << 20
"""Of metadata and tensor infos. The largest seen, with 262,144 tokens, has 6 MB."""

MAX_STRINGS = 1 << 22
"""Strings in the arrays of one file: 8 times the largest vocabulary; Python needs about 60 bytes for each."""

WINDOW_BYTES = 1 << 20
"""Read at a time."""


def damaged(path: Path, what: str, problem: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {what} {problem}. The file is damaged or not GGUF: download it again.")


class Cursor:
    """Walks through the header. A window of the file is held; `at` never passes `end`."""

    def __init__(self, path: Path, handle: FileIO, size: int) -> None:
        self.path, self._handle = path, handle
        self.at, self.size, self.end = 0, size, min(size, MAX_HEADER_BYTES)
        self._window, self._begin = b"", 0
        self._strings = 0

    @property
    def left(self) -> int:
        return self.end - self.at

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            limit = "the limit of a header" if self.end < self.size else "the end of the file"
            damaged(self.path, what, f"needs {count} bytes, but {self.left} are left before {limit}")
        begin = self.at - self._begin
        if begin + count > len(self._window):
            self._window, self._begin, begin = self._read(max(count, WINDOW_BYTES)), self.at, 0
            if len(self._window) < count:
                damaged(self.path, what, "ends early")
        self.at += count
        return self._window[begin : begin + count]

    def _read(self, count: int) -> bytes:
        """From `at` on; fewer bytes at the end."""
        pieces, left = [], min(count, self.end - self.at)
        self._handle.seek(self.at)
        while left and (piece := self._handle.read(left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            damaged(self.path, what, f"is {length} bytes long; at most {limit} are allowed")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            damaged(self.path, what, f"is not UTF-8 text ({error.reason})")

    def strings(self, count: int, what: str) -> list[str]:
        """An array of them; decoded without the checks' overhead while they lie inside the window."""
        most = min(MAX_STRINGS - self._strings, self.left // 8)
        if count > most:
            damaged(self.path, what, f"claims {count} strings; {most} at most fit here")
        self._strings += count
        found: list[str] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(found) < count:
            window, begin = self._window, self.at - self._begin
            safe = len(window) - 8
            try:
                while begin <= safe and len(found) < count:
                    end = begin + 8 + length_at(window, begin)[0]
                    if end > len(window):
                        break
                    found.append(window[begin + 8 : end].decode())
                    begin = end
            except UnicodeDecodeError as error:
                damaged(self.path, f"{what}[{len(found)}]", f"is not UTF-8 text ({error.reason})")
            self.at = self._begin + begin
            if len(found) < count:  # one that crosses the window's edge
                found.append(self.string(f"{what}[{len(found)}]"))
        return found
