"""JSON one character at a time: the name and the arguments of a call, as soon as they are there.

Nothing depends on how the text is cut into pieces: every decision is taken at a character.
"""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
_LITERALS = ("true", "false", "null")

MAX_DEPTH = 200
"""Levels of nesting in a call. `json.loads` on the client's side would give up at about 1,000."""


class JsonScanner:
    """Follows one JSON object or array. `failed` at the first character that cannot belong to it, `done` at its last.

    Invariant: `stack` holds the brackets that are open; `state` says what may come next inside the innermost.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.state = "value"
        self.done = False
        self.failed = False
        self._part = ""

    def step(self, c: str) -> None:
        if self.state == "word" and not (c.isalnum() or c in "+-."):
            self._end_word()
        if self.failed:
            return
        handler = getattr(self, f"_{self.state}")
        handler(c)

    def _value(self, c: str) -> None:
        if c in _SPACE:
            return
        if c in "{[":
            self.stack.append(c)
            self.state = "first_key" if c == "{" else "first_item"
            self.failed = len(self.stack) > MAX_DEPTH
        elif c == '"' and self.stack:
            self.state = "string"
        elif self.stack and (c in "-tfn" or "0" <= c <= "9"):
            self.state, self._part = "word", c
        else:
            self.failed = True

    def _first_item(self, c: str) -> None:
        if c == "]":
            self._close(c)
        else:
            self._value(c)

    def _first_key(self, c: str) -> None:
        if c == "}":
            self._close(c)
        else:
            self._key(c)

    def _key(self, c: str) -> None:
        if c == '"':
            self.state = "key_string"
        elif c not in _SPACE:
            self.failed = True

    def _key_string(self, c: str) -> None:
        self._in_string(c, "colon")

    def _string(self, c: str) -> None:
        self._in_string(c, "after")

    def _in_string(self, c: str, following: str) -> None:
        if self._part:  # an escape is under way
            self._escape(c)
        elif c == '"':
            self.state = following
        elif c == "\\":
            self._part = c
        elif c < " ":
            self.failed = True

    def _escape(self, c: str) -> None:
        self._part += c
        if self._part[1] == "u":
            self.failed = len(self._part) > 2 and c not in "0123456789abcdefABCDEF"
            if len(self._part) == 6:
                self._part = ""
        else:
            self.failed = c not in '"\\/bfnrt'
            self._part = ""

    def _colon(self, c: str) -> None:
        if c == ":":
            self.state = "value"
        elif c not in _SPACE:
            self.failed = True

    def _after(self, c: str) -> None:
        if c == ",":
            self.state = "key" if self.stack[-1] == "{" else "value"
        elif c in "]}":
            self._close(c)
        elif c not in _SPACE:
            self.failed = True

    def _word(self, c: str) -> None:
        self._part += c
        self.failed = len(self._part) > 400

    def _close(self, c: str) -> None:
        if self.stack.pop() + c not in ("{}", "[]"):
            self.failed = True
        self.done = not self.stack
        self.state = "after"

    def _end_word(self) -> None:
        self.failed = not (self._part in _LITERALS or _NUMBER.match(self._part))
        self.state, self._part = "after", ""


NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
"""The second is Llama's word."""


class CallScanner:
    """Reads `{"name": ..., "arguments": {...}}`, keys in any order, others ignored.

    `name` is set when known; `pieces` collects the text of the arguments that has not been fetched, complete only when
    `done`. Arguments written as a JSON string are given decoded, whole. A name that is not in `known` fails.
    """

    def __init__(self, known: frozenset[str] | None = None) -> None:
        self._json = JsonScanner()
        self._known = known
        self.name: str | None = None
        self.has_arguments = False
        self.done = False
        self.failed = False
        self._pieces: list[str] = []
        self._key = ""
        self._recorded: list[str] | None = None
        self._streams = False

    @property
    def ready(self) -> bool:
        """Whether a call is certain: its name is known, and its arguments have begun or it is over."""
        return self.name is not None and (self.has_arguments or self.done)

    def take(self) -> str:
        """Arguments that came since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def step(self, c: str) -> None:
        scan = self._json
        state, depth = scan.state, len(scan.stack)
        scan.step(c)
        if scan.failed:
            self.failed = True
            return
        if depth == 1 and state in ("first_key", "key") and c == '"':
            self._recorded = []
        elif depth == 1 and state == "value" and scan.state != "value":
            self._begin_value(c)
        elif self._recorded is not None and self._streams:
            self._pieces.append(c)
            if len(scan.stack) == 1:
                self._recorded, self._streams = None, False
        elif self._recorded is not None:
            self._record(c, state, scan.state)
        self.done = scan.done
        if self.done:
            self._finish()

    def _begin_value(self, c: str) -> None:
        self._recorded = None
        if self._key in NAME_KEYS and self.name is None:
            self._recorded = [c]
            self.failed = c != '"'
        elif self._key in ARGUMENT_KEYS and not self.has_arguments:
            self._recorded = [c]
            self._streams = c == "{"
            self.failed = c not in '{"n'
            if self._streams:
                self.has_arguments = True
                self._pieces.append(c)

    def _record(self, c: str, before: str, after: str) -> None:
        assert self._recorded is not None
        if before == "key_string":
            if after == "colon":
                self._key, self._recorded = _text('"' + "".join(self._recorded) + '"'), None
            else:
                self._recorded.append(c)
            return
        if before == "word" and after != "word":  # null instead of arguments
            self._recorded = None
            return
        self._recorded.append(c)
        if before == "string" and after == "after":
            text, self._recorded = _text("".join(self._recorded)), None
            if self._key in NAME_KEYS:
                self.name, self.failed = text, not text or (self._known is not None and text not in self._known)
            else:
                self._give_decoded(text)

    def _give_decoded(self, text: str) -> None:
        text = text.strip() or "{}"
        scan = JsonScanner()
        for c in text:
            scan.step(c)
            if scan.failed:
                break
        if text[0] != "{" or scan.failed or not scan.done:
            self.failed = True
            return
        self.has_arguments = True
        self._pieces.append(text)

    def _finish(self) -> None:
        if self.name is None:
            self.failed = True
        elif not self.has_arguments:
            self._pieces.append("{}")


def _text(literal: str) -> str:
    return str(json.loads(literal))
