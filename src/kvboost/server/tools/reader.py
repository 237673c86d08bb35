"""Reads tool calls out of text as it is generated.

What is said does not depend on how the text was cut into pieces, only when it is said does. What turns out to be no
call before its name and arguments had begun is text. A call that breaks later stays a call with broken arguments in a
stream, because pieces of it are gone; `collect` in openai.py makes it text again in a whole answer.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvboost.engine.detokenizer import special_ids
from kvboost.server.tools.formats import Format
from kvboost.server.tools.scan import CallScanner, JsonScanner

_SPACE = " \t\n\r"
_MAX_NAME = 256


@dataclass(frozen=True)
class Text:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool; `index` counts the calls of one answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallPiece:
    """More of the arguments of a call, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True)
class CallEnd:
    """A call is over. `source` is all its text, marks included; `whole` is False when it broke or was cut off."""

    index: int
    whole: bool
    source: str


ToolEvent = Text | CallBegin | CallPiece | CallEnd


class Reader(Protocol):
    """What reads one answer."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ToolEvent]:
        """What follows from the next piece."""

    def finish(self) -> list[ToolEvent]:
        """What follows from the end of the text."""


def new_id(short: bool = False) -> str:
    """An id for a call; nine letters and digits for Mistral's templates."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9)) if short else f"call_{secrets.token_hex(12)}"


def marker_ids(tokenizer: Any, form: Format) -> dict[int, str]:
    """Special tokens that are marks of a format. Their text is left out of what the engine shows."""
    special = special_ids(tokenizer)
    found = {}
    for mark in filter(None, (form.opener, form.closer, *(("[CALL_ID]", "[ARGS]") if form.named else ()))):
        token = tokenizer.convert_tokens_to_ids(mark)
        # A mark that is no token is answered with the id of `unk`.
        if isinstance(token, int) and token in special and tokenizer.convert_ids_to_tokens(token) == mark:
            found[token] = mark
    return found


class FormatReader:
    """Reads one answer of a model that writes calls in `form`. `known`: names of the tools that were offered.

    States: text (outside), open (before a call's `{`), call (inside), name (`name{...}`), close (after a call).
    `_source` is the text since the last opener, all of which is text again should no call come of it.
    """

    def __init__(self, form: Format, known: frozenset[str], markers: dict[int, str] | None = None) -> None:
        self._form = form
        self._known = known
        self._markers = markers or {}
        self._buffer = ""
        self._source = ""
        self._space = ""
        self._index = -1
        self._begun = False
        self._after_call = False
        self._in_list = False
        self._call = CallScanner()
        self._arguments: JsonScanner | None = None
        self._state = "open" if form.bare else "text"
        self._bare = form.bare
        self._out: list[ToolEvent] = []

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ToolEvent]:
        """`token_ids`: the tokens of this piece, for marks that are special tokens and missing from `text`."""
        self._buffer += text + "".join(self._markers[t] for t in token_ids if t in self._markers)
        self._run(final=False)
        return self._taken()

    def finish(self) -> list[ToolEvent]:
        self._run(final=True)
        if self._begun:
            self._end(whole=False)
        elif self._state in ("open", "call", "name"):
            self._text(self._source + self._buffer)
        if self._index < 0:
            self._say(self._space)
        return self._taken()

    # -- the machine -----------------------------------------------------------------------------------------------

    def _run(self, final: bool) -> None:
        while self._buffer and getattr(self, f"_in_{self._state}")(final):
            pass

    def _in_text(self, final: bool) -> bool:
        at = self._buffer.find(self._form.opener) if self._form.opener else -1
        if at >= 0:
            self._text(self._buffer[:at])
            self._open(self._form.opener, self._buffer[at + len(self._form.opener) :])
            return True
        held = 0 if final else _overlap(self._buffer, self._form.opener)
        self._text(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _open(self, source: str, rest: str) -> None:
        self._source, self._buffer, self._in_list = source, rest, False
        self._bare = False
        self._state = "open"

    def _in_open(self, final: bool) -> bool:
        """Before a call: spaces, one `[`, then `{`, or a name."""
        self._skip_spaces()
        if not self._buffer:
            return False
        c = self._buffer[0]
        if c == "{":
            # An answer in JSON may well have a name in it: without a mark around it, it must be that of a tool.
            self._call, self._state = CallScanner(self._known if self._bare else None), "call"
        elif c == "[" and not self._in_list:
            self._consume(1)
            self._in_list = True
        elif self._bare and self._form.opener and self._buffer.startswith(self._form.opener):
            self._text(self._source)
            self._open(self._form.opener, self._buffer[len(self._form.opener) :])
        elif self._bare and not final and self._form.opener.startswith(self._buffer):
            return False
        elif self._form.named and not self._in_list and (c.isalnum() or c == "_"):
            self._state = "name"
        else:
            self._give_up()
        return True

    def _in_name(self, final: bool) -> bool:
        """`name{...}`, `name[ARGS]{...}`, `name[CALL_ID]id[ARGS]{...}`, as Mistral's newer models write."""
        end = self._buffer.find("{")
        head = self._buffer if end < 0 else self._buffer[:end]
        name = head.split("[")[0].strip(_SPACE)
        if len(head) > _MAX_NAME or not _is_name(name) or not all(c.isalnum() or c in "_-.[]" + _SPACE for c in head):
            self._give_up()
            return True
        if end < 0:
            return False
        self._consume(end)
        self._begin(name)
        self._arguments, self._state = JsonScanner(), "call"
        return True

    def _in_call(self, final: bool) -> bool:
        scan = self._arguments or self._call
        for place, c in enumerate(self._buffer):
            scan.step(c)
            if scan.failed:
                self._source += self._buffer[:place]
                self._flush_arguments(self._buffer[:place])
                self._buffer = self._buffer[place:]
                self._broken()
                return True
            if scan.done:
                self._source += self._buffer[: place + 1]
                done, self._buffer = self._buffer[: place + 1], self._buffer[place + 1 :]
                return self._complete(done)
        self._source += self._buffer
        self._flush_arguments(self._buffer)
        self._buffer = ""
        return False

    def _complete(self, done: str) -> bool:
        self._flush_arguments(done)
        if not self._begun:
            self._give_up()
            return True
        self._end(whole=True)
        self._state, self._source = "close", ""
        return True

    def _flush_arguments(self, text: str) -> None:
        if self._arguments is not None:
            self._piece(text)
            return
        call = self._call
        if not self._begun and call.ready and call.name is not None:
            self._begin(call.name)
        if self._begun:
            self._piece(call.take())

    def _broken(self) -> None:
        """The JSON went wrong. What was begun goes on, verbatim, to the next mark."""
        if self._begun:
            self._state = "broken"
        else:
            self._give_up()

    def _in_broken(self, final: bool) -> bool:
        stop = self._form.closer or self._form.opener
        at = self._buffer.find(stop) if stop else -1
        cut = at if at >= 0 else len(self._buffer) - (0 if final else _overlap(self._buffer, stop))
        self._source += self._buffer[:cut]
        self._piece(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        if at < 0:
            return False
        if self._form.closer:
            self._source += self._form.closer
        self._end(whole=False)
        self._state, self._source, self._in_list = "close", "", False
        return True

    def _in_close(self, final: bool) -> bool:
        """After a call: the end of a list, a closer, or another call. Spaces here are nobody's."""
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if self._in_list:
            if self._buffer[0] == "]":
                self._in_list = False
                self._buffer = self._buffer[1:]
                return True
            if self._buffer[0] == ",":
                self._source, self._buffer, self._state = ",", self._buffer[1:], "open"
                return True
        for mark in filter(None, (self._form.closer, self._form.opener)):
            if self._buffer.startswith(mark):
                rest = self._buffer[len(mark) :]
                if mark == self._form.opener:
                    self._open(mark, rest)
                else:
                    self._buffer, self._state = rest, "text"
                return True
            if not final and mark.startswith(self._buffer):
                return False
        if self._buffer[0] == "{" or self._buffer[0] in self._form.separators:
            width = self._buffer[0] != "{"
            following = self._buffer[width:].lstrip(_SPACE)
            if not following and not final:
                return False
            if following.startswith("{"):
                self._source, self._buffer, self._state = self._buffer[:width], self._buffer[width:], "open"
                return True
        self._state = "text"
        return True

    # -- what is said ----------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        self._index += 1
        self._begun = True
        self._space = ""
        self._out.append(CallBegin(self._index, new_id(self._form.short_ids), name))

    def _piece(self, text: str) -> None:
        if text:
            self._out.append(CallPiece(self._index, text))

    def _end(self, whole: bool) -> None:
        self._out.append(CallEnd(self._index, whole, self._source))
        self._begun, self._arguments, self._after_call = False, None, True

    def _give_up(self) -> None:
        """No call after all: what was read is text, and so is what follows, up to the next opener."""
        self._text(self._source)
        self._source, self._arguments, self._in_list, self._bare = "", None, False, False
        self._state = "text"

    def _text(self, text: str) -> None:
        """Say text, but hold back spaces until it is known that no call follows them."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip(_SPACE)
        shown = text.rstrip(_SPACE)
        self._space = text[len(shown) :]
        self._say(shown)

    def _say(self, text: str) -> None:
        if text:
            self._after_call = False
            self._out.append(Text(text))

    def _skip_spaces(self) -> None:
        self._consume(len(self._buffer) - len(self._buffer.lstrip(_SPACE)))

    def _consume(self, count: int) -> None:
        self._source += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _taken(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out


class ForcedReader:
    """Reads the answer of a model that a grammar makes write nothing but the arguments of one tool."""

    def __init__(self, name: str, short_ids: bool) -> None:
        self._name = name
        self._short_ids = short_ids
        self._source = ""
        self._scan = JsonScanner()

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ToolEvent]:
        if not text:
            return []
        events: list[ToolEvent] = []
        if not self._source:
            events.append(CallBegin(0, new_id(self._short_ids), self._name))
        self._source += text
        for c in text:
            if not (self._scan.done or self._scan.failed):
                self._scan.step(c)
        return [*events, CallPiece(0, text)]

    def finish(self) -> list[ToolEvent]:
        return [CallEnd(0, self._scan.done and not self._scan.failed, self._source)] if self._source else []


def _overlap(text: str, mark: str) -> int:
    """How much of the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME and all(c.isalnum() or c in "_-." for c in text)
