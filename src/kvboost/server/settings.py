"""ServerConfig: every option of the server that is not the engine's, once. Flags and docs are derived from its fields."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Any

from kvboost.errors import ConfigError


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


TOOL_CALL_PARSERS = ("hermes", "llama3", "mistral")


@dataclass(frozen=True)
class ApiKey:
    """A key that clients present, and the salt under which their KV is kept apart (None: shared)."""

    key: str
    salt: str | None = None

    @classmethod
    def parse(cls, text: str) -> ApiKey:
        """`KEY` or `KEY:SALT`. Raises `ConfigError`."""
        key, colon, salt = text.partition(":")
        if not key or (colon and not salt) or not text.isascii() or any(c.isspace() for c in text):
            raise ConfigError("api_key", "must be KEY or KEY:SALT, neither part empty, ASCII without spaces.")
        return cls(key, salt or None)


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server. Raises `ConfigError` naming the field."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network this machine is in.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = _option(
        (), "Name of the model in the API; may be given several times. Default: the model argument."
    )
    api_key: tuple[str, ...] = _option(
        (), "Key that clients must present; may be given several times. KEY:SALT keeps that key's KV apart."
    )
    chat_template: str | None = _option(None, "File with a Jinja chat template, in place of the tokenizer's own.")
    tool_call_parser: str | None = _option(
        None, "How tool calls are read: hermes, llama3 or mistral. Default: by the chat template."
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "Origin whose web pages may call the server (CORS); may be given several times. Default: none."
    )
    allowed_hosts: tuple[str, ...] = _option(
        (), "Further name in Host headers to answer to; may be given several times. Checked on loopback only."
    )
    max_body_mib: float = _option(16.0, "Largest request body in MiB; beyond it: 413.")
    request_timeout: float = _option(600.0, "Seconds a request may take, queueing included; beyond it: 504.")
    client_timeout: float = _option(20.0, "Seconds a client has to send its headers, and again its body; then: 408.")
    shutdown_timeout: float = _option(30.0, "Seconds that running requests get after SIGTERM or Ctrl-C.")
    otlp_traces_endpoint: str | None = _option(
        None, "Send a trace of each request to this OpenTelemetry collector (OTLP over HTTP)."
    )
    log_level: str = _option("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"got {self.port}; allowed: 0 to 65535.")
        for name in ("max_body_mib", "request_timeout", "client_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"got {getattr(self, name)}; it must be above 0.")
        if not self.shutdown_timeout >= 0:
            raise ConfigError("shutdown_timeout", f"got {self.shutdown_timeout}; it must be at least 0.")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError("log_level", f"got {self.log_level!r}; allowed: debug, info, warning, error.")
        if self.tool_call_parser not in (None, *TOOL_CALL_PARSERS):
            allowed = ", ".join(TOOL_CALL_PARSERS)
            raise ConfigError("tool_call_parser", f"got {self.tool_call_parser!r}; allowed: {allowed}.")
        for name in ("served_model_name", "allowed_origins", "allowed_hosts"):
            if any(not value for value in getattr(self, name)):
                raise ConfigError(name, "holds an empty value. Leave it out.")
        keys = [key.key for key in self.keys]
        if len(set(keys)) != len(keys):
            raise ConfigError("api_key", "the same key is given twice.")

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(ApiKey.parse(text) for text in self.api_key)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


SERVER_FIELDS = frozenset(f.name for f in fields(ServerConfig))
