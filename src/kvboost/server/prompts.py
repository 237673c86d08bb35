"""From the messages and prompts of a request to token ids. Every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.api.kvboost import KVBoost
from kvboost.api.prompts import encode, encode_text, render_chat
from kvboost.server.errors import ApiError, unsupported
from kvboost.server.schema import ChatMessage

RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "tokenizer"}
)  # fmt: skip
"""What `apply_chat_template` takes for itself: a client's variables for the template must not reach it. A template of the
client's own least of all: it is a program."""


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: text content, calls with their arguments as objects."""
    return [_plain_message(message, i) for i, message in enumerate(messages)]


def _plain_message(message: ChatMessage, number: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    content = message.content
    if content is None:
        if message.role not in ("assistant",):
            raise ApiError(400, f"messages[{number}].content: is missing.", param=f"messages[{number}].content",
                           code="missing_required_parameter")  # fmt: skip
        content = ""
    if not isinstance(content, str):
        for j, part in enumerate(content):
            if part.text is None:
                where = f"messages[{number}].content[{j}].text"
                raise ApiError(400, f"{where}: is missing.", param=where, code="missing_required_parameter")
        content = "".join(part.text or "" for part in content)
    plain["content"] = content
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]  # fmt: skip
    return plain


def _arguments(text: str) -> Any:
    """Templates write arguments with `tojson`; what is no JSON object is passed on as the text it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def chat_size(messages: Sequence[ChatMessage]) -> int:
    """Characters of a conversation, about: decides where it is tokenised."""
    return sum(
        len(m.content) if isinstance(m.content, str) else sum(len(p.text or "") for p in m.content or ())
        for m in messages
    )


def chat_ids(
    kv: KVBoost,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation through the chat template. Raises `InvalidRequest` or `ApiError`."""
    for name in template_kwargs or ():
        if name in RESERVED:
            raise unsupported(f"chat_template_kwargs.{name}", "is set by the server.")
    options: dict[str, Any] = dict(template_kwargs or {})
    if continue_final_message:
        if add_generation_prompt:
            raise ApiError(400, "continue_final_message: needs add_generation_prompt=false.",
                           param="continue_final_message", code="invalid_value")  # fmt: skip
        options["continue_final_message"] = True
    text = render_chat(
        messages, kv.tokenizer, tools=list(tools) if tools else None, add_generation_prompt=add_generation_prompt,
        **options,
    )  # fmt: skip
    return encode_text(text, kv.tokenizer, add_special_tokens=False)


def split_prompt(prompt: Any) -> list[Any]:
    """A `prompt` field as a list of prompts: texts or lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def prompt_ids(kv: KVBoost, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
    """Token ids of one text, or checked ids."""
    if isinstance(prompt, str):
        return encode_text(prompt, kv.tokenizer, add_special_tokens=add_special_tokens)
    return encode(prompt, kv.tokenizer, kv.vocab_size)


def prompt_size(prompt: Any) -> int:
    """Characters of a `prompt` field, about."""
    return len(prompt) if isinstance(prompt, str) else sum(len(p) if isinstance(p, (str, list)) else 1 for p in prompt)
