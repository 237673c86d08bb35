"""From token ids to text as they are made, and the search for stop strings. Knows no torch.

What is shown is never taken back: text that a later token may still change, or that may become a stop string, waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"

_MAX_UNFINISHED = 3
"""A UTF-8 character lacks its end for at most 3 bytes, hence 3 tokens and, in some decoders, 3 replacement marks."""

_WINDOW = 16
_CONTEXT = 4
"""Tokens decoded again at each push: grows to `_WINDOW`, is then cut back to `_CONTEXT` when that changes no text."""


class Detokenizer:
    """The growing text of one request.

    The pieces from `push` and `flush`, joined, equal `tokenizer.decode(output_ids)` without clean-up of spaces, up to
    a stop string. The exception is a run of byte tokens (`<0xE4>`) that turns out malformed after some of its
    characters were shown: those stay, and the rest is decoded by itself.
    The prompt is no part of that text: a space at the very beginning is dropped where the tokenizer drops it.

    stop: the match that is complete first wins; of several complete at the same character, the longest.
    min_tokens: a stop string that is complete within so many tokens is ordinary text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int] = (),
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._text = _StableText(tokenizer, skip_special_tokens)
        self._stops = _StopFinder(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """(text that may be shown now, stop string that matched). After a match, tokens are ignored."""
        shown = ""
        for token in token_ids:
            if self._stops.matched is not None:
                break
            self._num_tokens += 1
            new = self._text.push(token)
            shown += self._stops.push(new, self._num_tokens > self._min_tokens)
        self._note(shown)
        return shown, self._stops.matched

    def flush(self) -> str:
        """The text held back, once no token follows; empty after a stop string. Never shows a stop string."""
        if self._stops.matched is not None:
            return ""
        shown = self._stops.push(self._text.flush(), self._num_tokens > self._min_tokens) + self._stops.flush()
        self._note(shown)
        return shown

    def _note(self, shown: str) -> None:
        if shown:
            self._shown.append(shown)


class _StableText:
    """Text that no later token can change. Cost per token does not depend on the length of the output.

    Invariant: `decode(window)` begins with `done`, whose text has been returned, or did before a character in
    several byte tokens began.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._done = ""
        self._num_good = 0  # tokens of the window when it last began with `done`
        self._next_cut = _WINDOW

    def push(self, token: int) -> str:
        if token in self._special:  # they add nothing, and a window of them alone would give no context
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        stable = text[: len(text) - _num_open(text)]
        if not stable.startswith(self._done):
            # Byte tokens of one run are decoded together: half a character blots out the whole ones before it.
            if len(self._window) - self._num_good <= _MAX_UNFINISHED and text.endswith(_REPLACEMENT):
                return ""
            self._window = self._window[self._num_good :]
            self._done = ""
            text = self._decode(self._window)
            stable = text[: len(text) - _num_open(text)]
        new = stable[len(self._done) :]
        self._done = stable
        self._num_good = len(self._window)
        if len(self._window) >= self._next_cut:
            self._cut(text, len(text) - len(stable))
        return new

    def flush(self) -> str:
        text = self._decode(self._window)
        if not text.startswith(self._done):
            text = self._decode(self._window[self._num_good :])
            self._done = ""
        new = text[len(self._done) :]
        self._window, self._done, self._num_good = [], "", 0
        return new

    def _cut(self, text: str, num_open: int) -> None:
        """Forget the oldest tokens, where those that stay give the same end of the text by themselves."""
        for keep in range(_CONTEXT, _WINDOW - _CONTEXT):
            kept = self._decode(self._window[-keep:])
            if len(kept) > num_open and text.endswith(kept):
                self._window = self._window[-keep:]
                self._done = kept[: len(kept) - num_open]
                self._num_good = keep
                self._next_cut = _WINDOW
                return
        self._next_cut = 2 * len(self._window)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text


class _StopFinder:
    """Lets text through up to the first stop string, holding back what may be the start of one.

    Invariant: `held` is the longest end of the text that begins some stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, new: str, search: bool) -> str:
        """Text to show now. A match that ends in `new` counts when `search` is set."""
        if not self._stops or not new:
            return new
        text = self._held + new
        if search and (match := self._first(text, len(self._held))) is not None:
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched) if self._include else start]
        keep = self._num_possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, the longest of those; only matches that end after `old`."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_possible(self, text: str) -> int:
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


def _num_open(text: str) -> int:
    """Replacement marks at the end that may still become a character."""
    if not text.endswith(_REPLACEMENT):
        return 0
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNFINISHED)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `decode(skip_special_tokens=True)` leaves out."""
    if getattr(tokenizer, "is_fast", False):
        return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids)
