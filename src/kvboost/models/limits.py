"""What a model's config says about it: refusals, and the longest sequence it can serve exactly. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from kvboost.errors import UnsupportedModel

PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose mask is fixed by positions alone, as paged attention builds it."""

COMPAT_LAYER_TYPES = PAGED_LAYER_TYPES | {"chunked_attention"}
"""Layer types that keep a key and a value per token; the model's own attention knows their masks."""

OTHER_MODALITIES = ("vision_config", "audio_config", "speech_config", "video_config")

LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

UNBOUNDED_LENGTH = 2048
"""Assumed when the config names no limit (BLOOM's ALiBi has none; it was trained on 2,048 tokens)."""


@dataclass(frozen=True)
class LengthLimit:
    """Tokens, and why the limit is there."""

    tokens: int
    reason: str


def text_config(config: PreTrainedConfig) -> Any:
    """The language model's part of a config."""
    return config.get_text_config(decoder=True)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Attention type of each layer, as far as the config names them. MLP types are left out."""
    names = getattr(text_config(config), "layer_types", None) or []
    renamed = {"attention": "full_attention", "mamba": "linear_attention"}
    return [renamed.get(name, name) for name in names]


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel`, naming the reason, for architectures whose state is not a KV cache."""
    name = f"{config.model_type!r} ({', '.join(config.architectures or ['unknown architecture'])})"
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; KVBoost serves decoder-only language models.")
    for part in OTHER_MODALITIES:
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(
                f"{name} takes more than text ({part}): its attention needs token types. Load the text-only model."
            )
    strange = sorted(set(layer_types(config)) - COMPAT_LAYER_TYPES)
    if strange:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(strange)}: their state is not a key and a value per token, "
            "so prefixes of it cannot be shared block by block. Models with attention layers only are supported."
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"{name} has no causal language model in Transformers.")
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} is recurrent or hybrid ({model_class.__name__} keeps a state that is not a KV cache). "
            "Models with attention layers only are supported."
        )


def length_limit(config: PreTrainedConfig) -> LengthLimit:
    """The longest sequence the model can serve with KV that stays valid while a sequence grows."""
    text = text_config(config)
    for field in LENGTH_FIELDS:
        tokens = getattr(text, field, None)
        if isinstance(tokens, int) and tokens > 0:
            limit = LengthLimit(tokens, f"config.{field}")
            break
    else:
        limit = LengthLimit(UNBOUNDED_LENGTH, "the config names no limit")
    for rope in _rope_settings(text):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if "dynamic" not in kind and kind != "longrope":
            continue
        # Such frequencies change for *all* positions once any sequence passes this length: stored keys would go stale.
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if isinstance(original, int) and original < limit.tokens:
            limit = LengthLimit(original, f"{kind} rotary frequencies change beyond original_max_position_embeddings")
    return limit


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    settings = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(settings, dict):
        return []
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]
