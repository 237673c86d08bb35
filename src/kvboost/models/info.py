"""What is known and decided about a model, for `kvboost info`. Loads, describes, lets go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost.attention.backends import choose
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.models.capabilities import discover
from kvboost.models.limits import layer_types, length_limit, text_config
from kvboost.models.loading import (
    Source,
    load_config,
    load_model,
    load_tokenizer,
    locate,
    resolve_device,
    resolve_dtype,
)
from kvboost.weights.gguf_model import unreadable
from kvboost.weights.sizes import WeightSize, packed_modules, parameter_sizes, total

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class ModelDescription:
    """Facts in the order they are shown. None where `load=False` leaves something unknown."""

    model: str
    architecture: str
    path: str | None
    reason: str | None
    layers: int
    layer_kinds: dict[str, int]
    attention: str
    sliding_windows: tuple[int, ...] | None
    parameters: int | None
    weights: str | None
    weights_gib: float | None
    dtype: str
    device: str
    attention_backend: str
    kv_bytes_per_token: int | None
    kv_gib_at_max_length: float | None
    max_model_len: int
    max_model_len_reason: str
    vocabulary: int
    chat_template: bool
    torch: str
    transformers: str


def describe_model(path: str, load: bool = True) -> ModelDescription:
    """Describe a directory, Hub id or `.gguf` file; with `load` the weights are read and its attention is tried.

    Raises `ModelLoadError`, and `UnsupportedModel` naming the reason for architectures that are refused.
    """
    import transformers

    source = locate(path)
    config = load_config(source)
    text = text_config(config)
    limit = length_limit(config)
    device = resolve_device("auto")
    tokenizer = load_tokenizer(source)
    dtype = resolve_dtype("auto", device)
    loaded: dict[str, Any] = {}
    attention = _heads(text)
    architecture = (config.architectures or [config.model_type])[0]
    backend = "known once the weights are loaded"
    if load:
        model = load_model(source, "auto", device)
        dtype, architecture = model.dtype, type(model).__name__
        capabilities = discover(model)
        layout = SlabLayout(capabilities.layers, DEFAULT_BLOCK_SIZE, str(dtype), model.dtype.itemsize)
        chosen = choose(capabilities.layers, capabilities.q_heads, model.dtype, device, compiled=True)
        size = total(parameter_sizes(model))
        backend = str(chosen) if capabilities.path == "paged" else "the model's own"
        attention = f"{capabilities.q_heads} query heads, {_shapes(capabilities.layers)}"
        loaded = {
            "path": capabilities.path,
            "reason": capabilities.reason,
            "sliding_windows": capabilities.windows,
            "parameters": size.weights,
            "weights": _held(model, source, size),
            "weights_gib": size.nbytes / 2**30,
            "kv_bytes_per_token": layout.bytes_per_token,
            "kv_gib_at_max_length": layout.bytes_per_token * limit.tokens / 2**30,
        }
    unknown = dict.fromkeys(
        ("path", "reason", "sliding_windows", "parameters", "weights", "weights_gib", "kv_bytes_per_token",
         "kv_gib_at_max_length")
    )  # fmt: skip
    kinds = layer_types(config) or ["full_attention"] * text.num_hidden_layers
    return ModelDescription(
        model=path,
        architecture=architecture,
        layers=text.num_hidden_layers,
        layer_kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        attention=attention,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend,
        max_model_len=limit.tokens,
        max_model_len_reason=limit.reason,
        vocabulary=text.vocab_size,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
        torch=torch.__version__,
        transformers=transformers.__version__,
        **{**unknown, **loaded},
    )


def _held(model: PreTrainedModel, source: Source, size: WeightSize) -> str:
    """How the weights are held, and why they are not packed when their file is."""
    packed = packed_modules(model)
    if packed:
        kinds = sorted({f"{module.packing.bits}-bit" for module in packed})
        return f"{len(packed)} modules packed ({', '.join(kinds)}), {size.bits_per_weight:.2f} bits per weight in all"
    reason = source.gguf and unreadable(source.gguf)
    return f"made dense: {reason}" if reason else "dense"


def _heads(text: Any) -> str:
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return f"{heads} query heads, {kv_heads} KV heads"


def _shapes(layers: tuple[LayerShape, ...]) -> str:
    """`3 KV heads of 64`, once for each shape there is."""
    texts = []
    for layer in dict.fromkeys(layers):
        dims = f"{layer.k_dim}" if layer.k_dim == layer.v_dim else f"{layer.k_dim} (keys) and {layer.v_dim} (values)"
        texts.append(f"{layer.k_heads} KV heads of {dims}")
    return "; ".join(texts)
