"""The request of /v1/responses: its fields, and its items as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kvboost.engine.structured_outputs import StructuredOutputsParams
from kvboost.server.errors import ApiError, unsupported
from kvboost.server.schema import ChatMessage, FunctionCall, Sampling, ToolCall
from kvboost.server.structured import json_schema, response_format

MAX_ITEMS = 10_000

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(Sampling):
    """POST /v1/responses. Nothing is stored: a conversation is sent whole each time, and its prefix is found again."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    stream: bool | None = None
    stream_options: None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    n: Literal[1] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    reasoning: Any = None
    prompt: Any = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("background", "store", mode="after")
    @classmethod
    def _never(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("nothing is stored here: send false, or leave it out.")
        return value

    @field_validator(
        "previous_response_id", "conversation", "reasoning", "prompt", "include", "max_tool_calls", mode="before"
    )
    @classmethod
    def _not_here(cls, value: Any) -> None:
        if value not in (None, []):
            raise ValueError("is not supported. Leave it out; earlier turns go into input.")


def text_format(text: Mapping[str, Any] | None) -> tuple[dict[str, Any], StructuredOutputsParams | None]:
    """(`text.format` as the answer repeats it, the grammar it asks for). Raises `ApiError` 400 naming the field."""
    for key in text or ():
        if key != "format" and (text or {})[key] is not None:
            raise unsupported(f"text.{str(key)[:80]}", "this server does not know the field. Leave it out.")
    form = (text or {}).get("format")
    if form is None:
        return {"type": "text"}, None
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        given = {key: value for key, value in form.items() if key != "type"}
        return dict(form), json_schema(given, "text.format")
    return dict(form) if isinstance(form, Mapping) else {}, response_format(form, "text.format")


def nested_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The flat tools of this API as those of chat completions."""
    if tools is None:
        return None
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if tool.get("type") == "function" and "function" not in tool
        else {"type": str(tool.get("type"))[:40] + ("" if tool.get("type") != "function" else " (nested)")}
        for tool in tools
    ]


def nested_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def messages_of(body: ResponsesRequest) -> list[ChatMessage]:
    """The conversation. Calls that follow one another belong to one turn. Raises `ApiError` 400 naming the item."""
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    calls: set[str] = set()
    for i, item in enumerate(body.input):
        _add(messages, calls, item, f"input[{i}]")
    return messages


def _add(messages: list[ChatMessage], calls: set[str], item: Mapping[str, Any], path: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _require(item, ("type", "role", "content", "id", "status", "phase"), path)
        role = item.get("role")
        if role not in _ROLES:
            raise _invalid(f"{path}.role", f"got {str(role)[:40]!r}; allowed: {', '.join(_ROLES)}.")
        messages.append(ChatMessage(role=role, content=_text(item.get("content"), f"{path}.content")))
    elif kind == "function_call":
        _require(item, ("type", "id", "call_id", "name", "arguments", "status"), path)
        call_id, name, arguments = (_string(item, key, path) for key in ("call_id", "name", "arguments"))
        calls.add(call_id)
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage(role="assistant", content=""))
        earlier = messages[-1].tool_calls or []
        messages[-1].tool_calls = [
            *earlier,
            ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments)),
        ]
    elif kind == "function_call_output":
        _require(item, ("type", "id", "call_id", "output", "status"), path)
        call_id = _string(item, "call_id", path)
        if call_id not in calls:
            raise _invalid(f"{path}.call_id", f"{call_id[:80]!r} is not the call_id of an earlier function_call.")
        messages.append(
            ChatMessage(role="tool", content=_text(item.get("output"), f"{path}.output"), tool_call_id=call_id)
        )
    else:
        raise unsupported(
            f"{path}.type", f"got {str(kind)[:40]!r}; supported: message, function_call, function_call_output."
        )


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(path, "must be text, or a list of parts.")
    pieces = []
    for j, part in enumerate(content):
        where = f"{path}[{j}]"
        if not isinstance(part, Mapping):
            raise _invalid(where, "must be an object with type and text.")
        if part.get("type") not in _TEXT_PARTS:
            raise unsupported(f"{where}.type", f"got {str(part.get('type'))[:40]!r}; this server takes text only.")
        pieces.append(_string(part, "text", where))
    return "".join(pieces)


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _invalid(f"{path}.{key}", "must be a string.")
    return value


def _require(item: Mapping[str, Any], allowed: Sequence[str], path: str) -> None:
    for key, value in item.items():
        if key not in allowed and value is not None:
            raise unsupported(f"{path}.{str(key)[:80]}", "this server does not know the field. Leave it out.")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
