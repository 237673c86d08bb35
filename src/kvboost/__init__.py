"""KVBoost: Hugging Face language models, with KV that is computed once. Public names load on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# How long idle compute threads spin before they sleep; libgomp reads it when torch loads it. Its own default, sixty times
# as long, is no faster alone, and beside another busy process lets 5 tokens a second be decoded instead of 29.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_EXPORTS = {
    "KVBoost": "kvboost.api.kvboost",
    "LLM": "kvboost.api.llm",
    "boost": "kvboost.api.boost",
    "unboost": "kvboost.api.boost",
    "SamplingParams": "kvboost.engine.sampling_params",
    "StructuredOutputsParams": "kvboost.engine.structured_outputs",
    "EngineConfig": "kvboost.config",
    "GenerationResult": "kvboost.api.results",
    "KVBoostError": "kvboost.errors",
    "ConfigError": "kvboost.errors",
    "InvalidRequest": "kvboost.errors",
    "PromptTooLong": "kvboost.errors",
    "ModelLoadError": "kvboost.errors",
    "UnsupportedModel": "kvboost.errors",
    "EngineBusy": "kvboost.errors",
    "EngineClosed": "kvboost.errors",
    "EngineStepError": "kvboost.errors",
}

__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from kvboost.api.boost import boost as boost
    from kvboost.api.boost import unboost as unboost
    from kvboost.api.kvboost import KVBoost as KVBoost
    from kvboost.api.llm import LLM as LLM
    from kvboost.api.results import GenerationResult as GenerationResult
    from kvboost.config import EngineConfig as EngineConfig
    from kvboost.engine.sampling_params import SamplingParams as SamplingParams
    from kvboost.engine.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from kvboost.errors import (
        ConfigError as ConfigError,
    )
    from kvboost.errors import (
        EngineBusy as EngineBusy,
    )
    from kvboost.errors import (
        EngineClosed as EngineClosed,
    )
    from kvboost.errors import (
        EngineStepError as EngineStepError,
    )
    from kvboost.errors import (
        InvalidRequest as InvalidRequest,
    )
    from kvboost.errors import (
        KVBoostError as KVBoostError,
    )
    from kvboost.errors import (
        ModelLoadError as ModelLoadError,
    )
    from kvboost.errors import (
        PromptTooLong as PromptTooLong,
    )
    from kvboost.errors import (
        UnsupportedModel as UnsupportedModel,
    )


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
