"""What a client is told when a request fails: OpenAI's error body and the status that its client library expects.

Every refusal leaves through here, so that a body has one shape: `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.errors import EngineBusy, EngineClosed, InvalidRequest, KVBoostError, PromptTooLong

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

RETRY_AFTER_SECONDS = 1
"""What a refused client is asked to wait: a step takes milliseconds to seconds, and a queue place is free after one."""

MAX_ECHO = 100
"""Characters of a client's own value that a message repeats."""

_BRANCH = re.compile(r"^(str|int|float|bool|none|nullable|list|tuple|dict|literal|function|constrained)\b|\W|^[A-Z]")
"""How pydantic names the branch of a union in an error's location, as opposed to a field of the request."""


class ApiError(KVBoostError):
    """An error with its HTTP status. `param` names the field at fault; `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """400 for a field that exists in the protocol and is not served here."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def api_error(error: BaseException) -> ApiError:
    """Any exception as what the client is told. Nothing of an unexpected one leaves the server but its kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineBusy):
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return ApiError(429, str(error), code="engine_busy", headers=headers)
    if isinstance(error, EngineClosed):
        return ApiError(503, "The server is shutting down.", code="shutting_down")
    if isinstance(error, KVBoostError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, f"Internal error ({type(error).__name__}). The server's log has the details.", code="internal")


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Pydantic's findings about a body as one 400 that names the field. Of a union's branches the deepest is told."""
    found = max(errors, key=lambda e: (len(_path(e["loc"])), e["type"] not in ("string_type", "none_required")))
    kind, param = found["type"], _spelled(_path(found["loc"]))
    if kind == "json_invalid":
        return ApiError(
            400, f"The body is not valid JSON: {found.get('ctx', {}).get('error', '')}.", code="invalid_json"
        )
    if kind == "missing":
        message = f"{param}: is missing." if param else "The body is missing. Send a JSON object."
        return ApiError(400, message, param=param or None, code="missing_required_parameter")
    if not param and isinstance(found.get("input"), bytes):
        return ApiError(400, "The body is not JSON. Send an object, with Content-Type: application/json.",
                        code="invalid_json")  # fmt: skip
    if kind == "extra_forbidden":
        return unsupported(param, "this server does not know the field. Leave it out.")
    text = str(found["msg"]).removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    given = found.get("input")
    echo = f" Got {_short(given)}." if isinstance(given, (str, int, float, bool)) or given is None else ""
    message = f"{param or 'body'}: {text}.{echo}".replace("..", ".")
    return ApiError(400, message, param=param or None, code="invalid_value")


def _path(location: Sequence[Any]) -> list[Any]:
    parts = [p for p in location if isinstance(p, int) or not _BRANCH.search(str(p))]
    return parts[1:] if parts and parts[0] in ("body", "query", "path", "header") else parts


def _spelled(path: Sequence[Any]) -> str:
    """`messages[0].content`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."
