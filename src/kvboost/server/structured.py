"""From `response_format` and vLLM's `structured_outputs` to the engine's grammars, compiled before anything is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvboost.engine.structured_outputs import FIELD, Form, StructuredOutputsParams
from kvboost.errors import InvalidRequest
from kvboost.server.errors import ApiError, unsupported

if TYPE_CHECKING:
    from kvboost.server.schema import ChatRequest, CompletionRequest
    from kvboost.server.state import ServerState
    from kvboost.server.tools.plan import ToolPlan

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_JSON_SCHEMA_KEYS = ("name", "schema", "strict", "description")


def response_format(value: Mapping[str, Any] | None, field: str = "response_format") -> StructuredOutputsParams | None:
    """`{type: text | json_object | json_schema}` of chat completions. Raises `ApiError` 400 naming the field."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid(field, "must be an object with a type.")
    kind = value.get("type")
    allowed = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _require_keys(value, allowed, field)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return json_schema(value.get("json_schema"), f"{field}.json_schema")
    raise unsupported(f"{field}.type", f"got {str(kind)[:40]!r}; supported: text, json_object, json_schema.")


def json_schema(value: Any, field: str) -> StructuredOutputsParams:
    """`{name, schema, strict, description}`. The schema is enforced with and without `strict`."""
    if not isinstance(value, Mapping):
        raise _invalid(field, "must be an object with name and schema.")
    _require_keys(value, _JSON_SCHEMA_KEYS, field)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise _invalid(f"{field}.name", "must be text, and not empty.")
    if "schema" not in value:
        raise _invalid(f"{field}.schema", "is missing.")
    return _made({"json": value["schema"]}, {"json": f"{field}.schema"})


def structured_outputs(value: Mapping[str, Any] | None, field: str = FIELD) -> StructuredOutputsParams | None:
    """vLLM's field of requests: `{json | regex | choice | grammar | json_object: ...}`."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid(field, f"must be an object with one of {', '.join(KINDS)}.")
    _require_keys(value, KINDS, field)
    return _made(value, {kind: f"{field}.{kind}" for kind in KINDS}, field)


def asked_forms(body: ChatRequest | CompletionRequest) -> dict[str, StructuredOutputsParams | None]:
    """What each field of a request that may ask for a form says. Raises `ApiError` 400 naming the field."""
    return {
        "response_format": response_format(body.response_format),
        "structured_outputs": structured_outputs(body.structured_outputs),
    }


async def require_form(
    state: ServerState, wanted: Mapping[str, StructuredOutputsParams | None], plan: ToolPlan | None = None
) -> Form | None:
    """The one grammar of a request, from the fields that may ask for one, compiled off the event loop.

    Making the requests then finds it done. Raises `ApiError` 400 naming the field.
    """
    given: list[tuple[str, Form]] = [(name, value) for name, value in wanted.items() if value is not None]
    if plan is not None and plan.structured_outputs is not None:
        given.insert(0, ("tools", plan.structured_outputs))
    if len(given) > 1:
        raise _invalid(given[1][0], f"cannot go with {given[0][0]}: an answer has one form.")
    if not given:
        return None
    field, form = given[0]
    if plan is not None and plan.calls and plan.structured_outputs is None:
        raise _invalid(field, "cannot go with tools: the form leaves no room for a call. Set tool_choice to 'none'.")
    try:
        await asyncio.to_thread(state.kv.grammars.compiled, form)
    except InvalidRequest as error:
        raise _renamed(error, {}, field) from error
    return form


def _made(values: Mapping[str, Any], names: Mapping[str, str], field: str = FIELD) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**values)
    except InvalidRequest as error:
        raise _renamed(error, names, field) from error


def _renamed(error: InvalidRequest, names: Mapping[str, str], field: str) -> ApiError:
    """The error under the name that the client gave the field: `response_format.json_schema.schema.properties.a`."""
    message = str(error).removeprefix(f"{error.field}: ")
    path = error.field.removeprefix(FIELD).lstrip(".")
    kind, _, rest = path.partition(".")
    name = (names[kind] + (f".{rest}" if rest else "")) if kind in names else field
    return ApiError(400, f"{name}: {message}", param=name, code="invalid_value")


def _require_keys(value: Mapping[str, Any], allowed: tuple[str, ...], field: str) -> None:
    for key in value:
        if key not in allowed:
            raise unsupported(f"{field}.{str(key)[:80]}", "this server does not know the field. Leave it out.")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
