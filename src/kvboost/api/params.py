"""From keyword arguments, Transformers' or ours, to `SamplingParams`, with the model's generation_config as defaults."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from kvboost.engine.sampling_params import SamplingParams
from kvboost.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 256
"""When neither the caller nor the generation_config says how long."""

TRANSFORMERS_TOP_K = 50
"""What Transformers keeps when sampling is on and nobody named a top_k."""

RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
"""Transformers' names for fields of SamplingParams."""

DEFAULTS_FROM_GENERATION_CONFIG = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""What vLLM takes over from a model's generation_config, and under which name."""

FIELDS = frozenset(f.name for f in fields(SamplingParams))
OWN = frozenset({"do_sample", "eos_token_id"})


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's generation_config says, as far as it concerns sampling."""

    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, generation_config: Any, tokenizer: Any) -> GenerationDefaults:
        def get(name: str, default: Any) -> Any:
            value = getattr(generation_config, name, None)
            return default if value is None else value

        eos = get("eos_token_id", None)
        if eos is None and tokenizer is not None:
            eos = getattr(tokenizer, "eos_token_id", None)
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return cls(
            do_sample=bool(get("do_sample", False)),
            temperature=float(get("temperature", 1.0)),
            top_p=float(get("top_p", 1.0)),
            top_k=int(get("top_k", TRANSFORMERS_TOP_K)),
            min_p=float(get("min_p", 0.0)),
            repetition_penalty=float(get("repetition_penalty", 1.0)),
            max_tokens=int(get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)),
            eos_ids=frozenset(int(i) for i in ids),
        )


def named_defaults(generation_config: Any) -> dict[str, Any]:
    """The sampling settings that a generation_config names, as fields of `SamplingParams`; Transformers' own defaults
    are not among them."""
    named = generation_config.to_diff_dict()
    return {
        ours: named[theirs] for theirs, ours in DEFAULTS_FROM_GENERATION_CONFIG.items() if named.get(theirs) is not None
    }


@dataclass(frozen=True)
class Resolved:
    """Sampling of one prompt, and the ids that end it (EOS and stop tokens)."""

    params: SamplingParams
    stop_ids: frozenset[int]


def resolve(sampling: SamplingParams | None, arguments: dict[str, Any], defaults: GenerationDefaults) -> Resolved:
    """Combine what the caller said with the model's defaults. Raises `InvalidRequest` for unknown names."""
    if sampling is not None:
        if arguments:
            name = next(iter(arguments))
            raise InvalidRequest(name, "give either sampling=SamplingParams(...) or keyword arguments, not both.")
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest("sampling", f"got {type(sampling).__name__}; it must be a SamplingParams.")
        return Resolved(sampling, _stop_ids(sampling, defaults.eos_ids))
    values = _renamed(arguments)
    do_sample = values.pop("do_sample", None)
    eos_ids = _eos_ids(values.pop("eos_token_id", None), defaults.eos_ids)
    values.setdefault("max_tokens", defaults.max_tokens)
    values.setdefault("repetition_penalty", defaults.repetition_penalty)
    if do_sample is None:
        # Asking for a temperature is asking to sample; otherwise the model's own habit decides.
        do_sample = values["temperature"] != 0 if "temperature" in values else defaults.do_sample
    if do_sample:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            values.setdefault(name, getattr(defaults, name))
    else:
        values["temperature"] = 0.0
    params = SamplingParams(**values)
    return Resolved(params, _stop_ids(params, eos_ids))


def _renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        target = RENAMED.get(name, name)
        if target not in FIELDS and target not in OWN:
            known = sorted({*FIELDS, *OWN, *RENAMED, "sampling", "cache_salt"})
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Allowed: {', '.join(known)}."
            raise InvalidRequest(name, f"unknown argument. {hint}")
        if target in values:
            raise InvalidRequest(name, f"given twice, as {name} and as {target}.")
        if value is not None or target in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            values[target] = value
    return values


def _eos_ids(given: Any, default: frozenset[int]) -> frozenset[int]:
    if given is None:
        return default
    ids = [given] if isinstance(given, int) else list(given)
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InvalidRequest("eos_token_id", f"got {given!r}; it must be a token id or a list of them.")
    return frozenset(ids)


def _stop_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
