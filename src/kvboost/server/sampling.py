"""From the sampling fields of a request to the engine's requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.api.params import named_defaults, resolve
from kvboost.engine.request import Request
from kvboost.engine.sampling_params import SamplingParams
from kvboost.server.errors import ApiError
from kvboost.server.schema import ChatRequest, CompletionRequest, Sampling
from kvboost.server.settings import ApiKey
from kvboost.server.state import ServerState

PASSED_ON = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "n", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip
"""Fields of `Sampling` that `SamplingParams` has under the same name."""


def sampling_params(state: ServerState, body: Sampling, **more: Any) -> SamplingParams:
    """What the body says, and where it says nothing, what the model's generation_config names. Raises `InvalidRequest`.

    more: fields of `SamplingParams` that each API names in its own way; None: not given.
    """
    values = named_defaults(state.kv.model.generation_config)
    limit = values.pop("max_tokens", None)
    for name in PASSED_ON:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values.update({name: value for name, value in more.items() if value is not None})
    values.setdefault("max_tokens", limit)
    return SamplingParams(**values)


def make_requests(
    state: ServerState, prompts: Sequence[list[int]], params: SamplingParams, salt: str | None, arrival_s: float
) -> list[list[Request]]:
    """For each prompt its `n` requests; their clock starts at `arrival_s`. Raises `InvalidRequest`."""
    if len(prompts) * params.n > state.kv.config.max_num_waiting:
        raise ApiError(400, f"n: {len(prompts)} prompts of n={params.n} are more than max_num_waiting="
                       f"{state.kv.config.max_num_waiting} together. Send fewer at once.", param="n",
                       code="invalid_value")  # fmt: skip
    resolved = resolve(params, {}, state.kv.defaults)
    groups = [state.kv.make_requests(ids, resolved, salt) for ids in prompts]
    for group in groups:
        for request in group:
            request.arrival_s = arrival_s
    return groups


def cache_salt(scope: Mapping[str, Any], asked: str | None) -> str | None:
    """The salt of a request: that of its API key, and what the body asks for within it."""
    key: ApiKey | None = scope.get("kvboost.key")
    if key is None or key.salt is None:
        return asked
    return key.salt if asked is None else f"{key.salt}\x00{asked}"


def wants_usage(body: ChatRequest | CompletionRequest) -> bool:
    """Whether a stream ends with a chunk of usage. Raises `ApiError` 400 for `stream_options` without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "stream_options: needs stream=true.", param="stream_options", code="invalid_value")
    return bool(body.stream_options.include_usage)


def require_model(state: ServerState, model: str | None) -> str:
    """The served name that was asked for. Raises `ApiError` 404."""
    if model is None:
        return state.model_names[0]
    if model not in state.model_names:
        raise ApiError(404, f"model: {model[:100]!r} is not served here; this server has "
                       f"{', '.join(state.model_names)}.", param="model", code="model_not_found")  # fmt: skip
    return model
