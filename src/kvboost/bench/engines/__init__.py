"""The engines that can be measured, behind one small interface. `open_engine` makes one from its name."""

from __future__ import annotations

from kvboost.bench.engines.base import Answer, Batch, BenchEngine, ModelSource
from kvboost.errors import ConfigError

__all__ = ["ENGINES", "Answer", "Batch", "BenchEngine", "ModelSource", "open_engine"]

ENGINES = {
    "kvboost": "this engine, with a model instance of its own",
    "transformers": "Transformers' generate: nothing kept between requests, padded batches",
    "transformers-pkv": "the same with its own past_key_values kept by hand; batches repeat the shared prefix's KV",
    "transformers-static": "Transformers' generate with StaticCache allocated to the longest sequence, padded batches",
    "transformers-cb": "Transformers' continuous batching (what generate_batch runs), its manager kept alive",
}


def open_engine(name: str, source: ModelSource) -> BenchEngine:
    """An engine by its name in `ENGINES`, or an OpenAI-compatible endpoint by URL (`http://host:port/v1`,
    `...@model-name` to choose one of its models). Raises `ConfigError`, `ModelLoadError`."""
    if name.startswith(("http://", "https://")):
        from kvboost.bench.engines.openai import OpenAIEngine

        return OpenAIEngine(name, source.tokenizer)
    if name == "kvboost":
        from kvboost.bench.engines.kvboost import KVBoostEngine

        return KVBoostEngine(source)
    if name == "transformers-cb":
        from kvboost.bench.engines.continuous import ContinuousBatchingEngine

        return ContinuousBatchingEngine(source)
    if name in ENGINES:
        from kvboost.bench.engines.transformers import PkvEngine, StaticEngine, TransformersEngine

        kinds = {"transformers": TransformersEngine, "transformers-pkv": PkvEngine, "transformers-static": StaticEngine}
        return kinds[name](source)
    raise ConfigError("engines", f"got {name!r}; give some of {', '.join(ENGINES)}, or the URL of an OpenAI endpoint.")
