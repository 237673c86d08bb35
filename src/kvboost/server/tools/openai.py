"""What a reader found, in OpenAI's form: `tool_calls` of a message, and deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvboost.server.tools.reader import CallBegin, CallEnd, CallPiece, Reader, Text, ToolEvent


def delta(event: ToolEvent) -> dict[str, Any] | None:
    """The `delta` of a chunk: a call's id and name first, then pieces of its arguments. None: nothing to send."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, CallPiece):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
    return None


def message(reader: Reader, pieces: Iterable[tuple[str, list[int]]], finish_reason: str) -> dict[str, Any]:
    """The `content` and `tool_calls` of a whole answer, given as (text, tokens) of its pieces.

    A call whose JSON broke is text. One that was cut off because the answer got too long stays, as OpenAI's do.
    """
    events = [event for text, ids in pieces for event in reader.feed(text, ids)]
    return collect([*events, *reader.finish()], cut_off=finish_reason == "length")


def collect(events: Iterable[ToolEvent], *, cut_off: bool = False) -> dict[str, Any]:
    """`{"content": text or None, "tool_calls": [...]}`, the latter only where there are some."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Text):
            content.append(event.text)
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.id, "type": "function", "function": function}
        elif isinstance(event, CallPiece):
            calls[event.index]["function"]["arguments"] += event.arguments
        elif isinstance(event, CallEnd) and not event.whole and not cut_off:
            del calls[event.index]
            content.append(event.source)
    found: dict[str, Any] = {"content": "".join(content) or (None if calls else "")}
    if calls:
        found["tool_calls"] = list(calls.values())
    return found


def finish_reason(reason: str, has_calls: bool, named: bool) -> str:
    """`tool_calls` where the answer ends with calls, unless the request named the function, or it was cut off."""
    return "tool_calls" if has_calls and reason == "stop" and not named else reason
