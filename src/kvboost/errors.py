"""One tree of exceptions. Every message says what was given, what is allowed and what to do next."""

from __future__ import annotations


class KVBoostError(Exception):
    """Base class of everything KVBoost raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """An engine option is out of range, or two options contradict each other."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class InvalidRequest(KVBoostError, ValueError):
    """A request was refused before any compute. `field` names the argument at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt (plus one token to generate) does not fit `max_model_len` or the KV pool."""


class ModelLoadError(KVBoostError, OSError):
    """The model's files are missing, damaged or not readable."""


class UnsupportedModel(ModelLoadError):
    """The architecture cannot be served exactly; the message names the reason."""


class EngineBusy(KVBoostError):
    """The waiting queue is full (HTTP 429). Try again later, or raise `max_num_waiting`."""


class EngineClosed(KVBoostError, RuntimeError):
    """The engine was closed, or lives in another process (fork)."""


class EngineStepError(KVBoostError, RuntimeError):
    """A step failed while this request was in it; other requests and later ones are not affected."""
