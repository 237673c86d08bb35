"""The ways models write tool calls, and which one a chat template teaches. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvboost.server.errors import ApiError


@dataclass(frozen=True)
class Format:
    """How calls look in a model's text.

    opener / closer: what stands around a call or a list of calls; without a closer, calls go on to the end of the text.
    bare: a text that begins with the JSON of a known tool is a call, without an opener. named: `name{arguments}` may
    follow the opener instead of JSON with the name in it. separators: between calls that are not in a list.
    short_ids: templates of this family insist on ids of nine letters and digits.
    """

    name: str
    opener: str
    closer: str = ""
    bare: bool = False
    named: bool = False
    separators: str = ""
    short_ids: bool = False


FORMATS = {
    "hermes": Format("hermes", "<tool_call>", "</tool_call>", separators=","),
    "llama3": Format("llama3", "<|python_tag|>", bare=True, separators=";,"),
    "mistral": Format("mistral", "[TOOL_CALLS]", named=True, separators=",", short_ids=True),
}
"""hermes: NousResearch's Hermes, Qwen 2.5 and 3, SmolLM2 and 3 (also a list inside one pair of marks).
llama3: Llama 3.1 to 3.3. mistral: Mistral and Mixtral Instruct since v0.3, both list and named form."""

BARE_LIST = Format("list", "", bare=True)
"""What the grammar of tool_choice "required" makes any model write: `[{"name": ..., "arguments": {...}}, ...]`."""

_XML = ("<function=", "<parameter=")
"""Qwen3-Coder and others write arguments as XML inside Hermes' marks."""


def find_format(asked: str | None, template: str) -> Format:
    """The format that the server was told, or the one that a chat template teaches; Hermes where it teaches none.

    Raises `ApiError` 400 when the template teaches one that is not read here.
    """
    if asked is not None:
        if asked not in FORMATS:
            raise ApiError(400, f"tool_call_parser: got {asked[:40]!r}; known: {', '.join(FORMATS)}.", param="tools",
                           code="invalid_value")  # fmt: skip
        return FORMATS[asked]
    if all(mark in template for mark in _XML):
        raise ApiError(
            400,
            "tools: this model writes calls as XML (<function=...>), which is not read here. Use tool_choice "
            "'required' or a function, or start the server with --tool-call-parser.",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    for mark, name in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3")):
        if mark in template:
            return FORMATS[name]
    if "ipython" in template and '"parameters"' in template:
        return FORMATS["llama3"]  # Llama 3.2 templates leave the mark out
    return FORMATS["hermes"]


def template_of(tokenizer: Any, *, with_tools: bool = True) -> str:
    """The text of a tokenizer's chat template: the one for tools where it has several."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        chosen = (template.get("tool_use") if with_tools else None) or template.get("default") or ""
        return str(chosen)
    return str(template)
