"""What a request's `tools` and `tool_choice` mean: which tools the prompt names, which grammar holds, how to read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.engine.json_schema import enforceable
from kvboost.engine.structured_outputs import Form as OutputForm
from kvboost.engine.structured_outputs import StructuredOutputsParams, ToolCallForm
from kvboost.errors import InvalidRequest
from kvboost.server.errors import ApiError, unsupported
from kvboost.server.tools.formats import BARE_LIST, FORMATS, Format, find_format, template_of
from kvboost.server.tools.reader import ForcedReader, FormatReader, Reader, marker_ids

MAX_TOOLS = 128
MAX_DESCRIPTION = 16_384

_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}\Z")
_EMPTY = {"type": "object", "properties": {}}

INSTRUCTIONS = """# Tools

You can call these functions. Each line is one of them, as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these marks, once for every call:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
"""For models whose chat template knows nothing of tools: Hermes' marks, which most models have seen."""


@dataclass(frozen=True)
class ToolPlan:
    """How one request deals with tools.

    tools: what the chat template is given; None: nothing. structured_outputs: the grammar that
    `tool_choice` or a strict function demands.
    named: `tool_choice` names one function, whose calls end with finish_reason "stop", as OpenAI's do.
    """

    tools: list[dict[str, Any]] | None = None
    structured_outputs: OutputForm | None = None
    named: bool = False
    _make: Callable[[], Reader] | None = field(default=None, repr=False)

    @property
    def calls(self) -> bool:
        """Whether an answer may hold calls."""
        return self._make is not None

    def reader(self) -> Reader | None:
        """What reads one continuation; None where its text is just text."""
        return None if self._make is None else self._make()


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
    tokenizer: Any,
    parser: str | None,
) -> ToolPlan:
    """Check `tools` (OpenAI's form of chat completions) and decide.

    parser: the name of a format, or None: by the chat template. Raises `ApiError` 400 naming the field.
    """
    if not tools:
        if tools is not None:
            raise _invalid("tools", "is empty. Leave it out, or give a function.")
        if tool_choice not in (None, "none", "auto"):
            raise _invalid("tool_choice", "needs tools.")
        return ToolPlan()
    checked = check_tools(tools)
    choice = _choice(tool_choice, [t["function"]["name"] for t in checked])
    if choice == "none":
        return ToolPlan()
    if choice == "auto":
        form = find_format(parser, template_of(tokenizer))
        known = frozenset(t["function"]["name"] for t in checked)
        marks = marker_ids(tokenizer, form)
        make: Callable[[], Reader] = lambda: FormatReader(form, known, marks)  # noqa: E731
        strict = _strict_form(tools, checked, form, marks, parallel_tool_calls is False)
        if parallel_tool_calls is False:
            return ToolPlan(checked, strict, False, lambda: _OnlyOne(make()))
        return ToolPlan(checked, strict, False, make)
    short = "[TOOL_CALLS]" in template_of(tokenizer) or parser == "mistral"
    if choice == "required":
        form = BARE_LIST if not short else Format("list", "", bare=True, short_ids=True)
        known = frozenset(t["function"]["name"] for t in checked)
        schema = _calls_schema(checked, 1 if parallel_tool_calls is False else MAX_TOOLS)
        return ToolPlan(checked, _enforced(schema, dict(enumerate(checked))), False, lambda: FormatReader(form, known))
    name = choice.removeprefix("=")
    (place,) = [i for i, t in enumerate(checked) if t["function"]["name"] == name]
    form_of_one = _enforced(_parameters(checked[place]), {place: checked[place]})
    return ToolPlan(checked, form_of_one, True, lambda: ForcedReader(name, short))


def _strict_form(
    tools: Sequence[Mapping[str, Any]],
    checked: Sequence[Mapping[str, Any]],
    form: Format,
    marks: Mapping[int, str],
    only_one: bool,
) -> ToolCallForm | None:
    """The grammar that functions with `strict: true` ask for; those without may take any JSON object."""
    strict = [i for i, tool in enumerate(tools) if tool["function"].get("strict")]
    if not strict:
        return None
    if not form.closer or form.closer in marks.values() or form.opener in marks.values():
        raise _invalid(
            f"tools[{strict[0]}].function.strict",
            f"cannot be promised with tool_choice 'auto' for the way this model writes calls ({form.name}). Leave it out, "
            "or set tool_choice to 'required' or a function: then every schema holds.",
        )
    schemas = [_checked_schema(tool, i) if i in strict else {"type": "object"} for i, tool in enumerate(checked)]
    names = [tool["function"]["name"] for tool in checked]
    return ToolCallForm(form.opener, form.closer, tuple(zip(names, schemas, strict=True)), only_one)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat templates want them. Raises `ApiError` 400 naming the field at fault."""
    if len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed.")
    checked = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [t["function"]["name"] for t in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _invalid(f"tools[{i}].function.name", f"{name!r} is there twice.")
    return checked


def _check_tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _invalid(path, "must be an object.")
    if tool.get("type") != "function":
        raise unsupported(f"{path}.type", f"got {str(tool.get('type'))[:40]!r}; only functions are supported.")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _invalid(f"{path}.function", "must be an object with name, description and parameters.")
    for given, allowed, where in (
        (tool, ("type", "function"), path),
        (function, ("name", "description", "parameters", "strict"), f"{path}.function"),
    ):
        for key in given:
            if key not in allowed:
                raise unsupported(f"{where}.{str(key)[:80]}", "this server does not know the field. Leave it out.")
    name, description, parameters = (function.get(k) for k in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.match(name):
        raise _invalid(f"{path}.function.name", "must be 1 to 64 letters, digits, `_`, `-` or `.`.")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise _invalid(f"{path}.function.description", f"must be text of at most {MAX_DESCRIPTION} characters.")
    if function.get("strict") not in (None, True, False):
        raise _invalid(f"{path}.function.strict", "must be true or false.")
    if parameters is not None and (not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"):
        raise _invalid(f"{path}.function.parameters", "must be a JSON schema of an object.")
    checked: dict[str, Any] = {"name": name, "description": description or "", "parameters": parameters or _EMPTY}
    return {"type": "function", "function": checked}


def _choice(value: Any, names: Sequence[str]) -> str:
    """auto, none, required, or `=name`."""
    if value is None or value in ("auto", "none", "required"):
        return value or "auto"
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in names:
            raise _invalid("tool_choice.function.name", f"{str(name)[:80]!r} is not among the tools.")
        return f"={name}"
    if isinstance(value, Mapping):
        raise unsupported("tool_choice.type", f"got {str(value.get('type'))[:40]!r}; only 'function' is supported.")
    raise _invalid("tool_choice", "must be 'none', 'auto', 'required' or {type: 'function', function: {name}}.")


def _calls_schema(tools: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
    """A list of calls. Each tool's schema moves under `$defs`, and its references with it."""
    definitions = {f"tool_{i}": _moved(_parameters(tool), f"#/$defs/tool_{i}") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": f"#/$defs/tool_{i}"}},
            "required": ["name", "arguments"],
        }
        for i, tool in enumerate(tools)
    ]
    return {"$defs": definitions, "type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}


def _parameters(tool: Mapping[str, Any]) -> Any:
    return {"type": "object", **tool["function"]["parameters"]}


def _moved(schema: Any, place: str) -> Any:
    """`schema` with references into itself as they are once it stands at `place`."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(value, place) for value in schema] if isinstance(schema, (list, tuple)) else schema


def _enforced(schema: Any, tools: Mapping[int, Mapping[str, Any]]) -> StructuredOutputsParams:
    """The grammar of a schema; what cannot be enforced is named by its place in the request."""
    for i, tool in tools.items():  # alone first: its paths are those the client knows
        _checked_schema(tool, i)
    try:
        return StructuredOutputsParams(json=schema)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_value") from error


def _checked_schema(tool: Mapping[str, Any], place: int) -> Any:
    """A tool's schema in the words of the grammar compiler. Raises `ApiError` 400 naming the path at fault."""
    try:
        return enforceable(_parameters(tool), f"tools[{place}].function.parameters")
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_value") from error


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


class _OnlyOne:
    """parallel_tool_calls=false where no grammar holds: later calls are dropped."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Any]:
        return [e for e in self._reader.feed(text, token_ids) if getattr(e, "index", 0) == 0]

    def finish(self) -> list[Any]:
        return [e for e in self._reader.finish() if getattr(e, "index", 0) == 0]


# -- templates that know nothing of tools ------------------------------------------------------------------------------


def messages_for(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Any
) -> list[Mapping[str, Any]]:
    """The conversation as the chat template can show it.

    A template that mentions tools gets it as it is. For others, tools are described in the system message, and earlier
    calls and their results are written out as text.
    """
    template = template_of(tokenizer)
    if "tools" in template or "tool_calls" in template:
        return list(messages)
    plain: list[Mapping[str, Any]] = [_written_out(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=described)
    if plain and plain[0].get("role") in ("system", "developer"):
        first = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _written_out(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message.get("tool_calls"):
        form = FORMATS["hermes"]
        calls = [
            json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False)
            for c in message["tool_calls"]
        ]
        written = "\n".join(f"{form.opener}\n{call}\n{form.closer}" for call in calls)
        content = message.get("content") or ""
        plain["content"] = f"{content}\n{written}" if content else written
    if message.get("role") == "tool":
        plain = {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    return plain
