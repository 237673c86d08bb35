"""From what callers give (text, ids, messages) to checked token ids. Every refusal names the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that chat templates on the Hub know."""

Prompt = str | Sequence[int]


def split_prompts(prompt: Any) -> tuple[list[Any], bool]:
    """(prompts, whether a list of prompts was given). A flat list of ints is one prompt."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequest("prompt", "got bytes; decode them first, for example data.decode('utf-8').")
    if not isinstance(prompt, Sequence):
        raise InvalidRequest("prompt", f"got {type(prompt).__name__}; give text, token ids, or a list of either.")
    if not prompt:
        raise InvalidRequest("prompt", "the list is empty; give text, token ids, or a list of either.")
    if isinstance(prompt[0], int):
        return [prompt], False
    return [_plain(p) for p in prompt], True


def encode(prompt: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of one prompt; special tokens are added once. Raises `InvalidRequest`."""
    if isinstance(prompt, str):
        return encode_text(prompt, tokenizer, add_special_tokens=True)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequest("prompt", f"got {type(prompt).__name__}; give text or a list of token ids.")
    if not prompt:
        raise InvalidRequest("prompt", "is empty; at least one token is needed.")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return list(prompt)  # the usual case, 20 times faster than looking at each
    for position, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest("prompt", f"token {position} is {token!r}; token ids are whole numbers.")
        if not 0 <= token < vocab_size:
            raise InvalidRequest("prompt", f"token {position} is {token}; this model has ids 0 to {vocab_size - 1}.")
    return list(prompt)


def encode_text(text: str, tokenizer: Any, *, add_special_tokens: bool) -> list[int]:
    """Tokenise. A leading BOS already written in the text is not doubled."""
    if tokenizer is None:
        raise InvalidRequest("prompt", "got text, but this model was loaded without a tokenizer. Give token ids.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "prompt",
            f"holds a lone surrogate at character {error.start}, which is not text. Decode it with errors='replace'.",
        ) from error
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise InvalidRequest("prompt", "is empty; give at least one character.")
    return ids


def render_chat(
    messages: Any, tokenizer: Any, *, tools: Any = None, add_generation_prompt: bool = True, **template_options: Any
) -> str:
    """The chat template's text for a conversation. Raises `InvalidRequest`."""
    check_messages(messages)
    if tokenizer is None:
        raise InvalidRequest("messages", "this model was loaded without a tokenizer. Use generate() with token ids.")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            "messages", "the tokenizer has no chat template. Use generate() with text, or set tokenizer.chat_template."
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_options,
            )
        )
    except Exception as error:  # templates raise what their authors chose
        raise InvalidRequest("messages", f"the chat template refused them: {error}") from error


def check_messages(messages: Any) -> None:
    """Raise `InvalidRequest` unless `messages` is a non-empty list of {role, content}."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            "messages", f"got {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}."
        )
    if not messages:
        raise InvalidRequest("messages", "the list is empty; give at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{i}]", f"got {type(message).__name__}; it must be a dict with role and content."
            )
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"messages[{i}].role", f"got {role!r}; allowed: {', '.join(ROLES)}.")
        content = message.get("content")
        if content is None and (message.get("tool_calls") or role == "assistant"):
            continue
        if not isinstance(content, (str, Sequence)) or isinstance(content, (bytes, bytearray)):
            raise InvalidRequest(f"messages[{i}].content", f"got {type(content).__name__}; it must be text.")


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value
