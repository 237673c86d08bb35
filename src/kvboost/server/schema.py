"""The requests of the API as pydantic models. A field that is not here is refused by name, never ignored.

Fields of OpenAI come first, then vLLM's. `None` always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_STOPS = 64
"""Each is searched for at every token."""

Tokens = list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]]

Salt = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00]+$")]
"""A zero would let one client write another's salt: see `sampling.cache_salt`."""


class Strict(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(Strict):
    """What completions, chat and responses share."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=4096)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str], Field(max_length=1024)] | None = None
    cache_salt: Salt | None = None
    structured_outputs: dict[str, Any] | None = None

    user: str | None = None
    """Names the client's own user: changes nothing."""


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    model: str | None = None
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100, strict=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: None = None
    suffix: None = None
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None

    @field_validator("best_of", mode="before")
    @classmethod
    def _no_best_of(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("best_of is not supported: ask for n continuations, and choose among them.")

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("filling in before a suffix is not supported. Put the model's own markers in the prompt.")


class ContentPart(BaseModel):
    """A piece of a message. Only text is served."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"parts of type {value[:40]!r} are not supported; this server takes text only.")
        return value


class FunctionCall(Strict):
    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One turn. Fields that OpenAI's answers carry may be sent back when they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: Tokens


class WarmRequest(Strict):
    """POST /v1/cache/warm: compute and keep the KV of a text, token ids, or the start of a conversation."""

    prompt: str | Annotated[Tokens, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    pin: bool = False
    cache_salt: Salt | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error of this server looks like."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "A field is wrong, unsupported or unknown; `param` names it."),
        (401, "No valid API key."),
        (404, "No such model or path."),
        (413, "The body is larger than --max-body-mib."),
        (429, "The queue is full; try again after Retry-After seconds."),
        (503, "The server is shutting down."),
        (504, "The request took longer than --request-timeout."),
    )
}
"""For the OpenAPI document."""
