"""What a loaded model can do, found out once by running a few tokens through it.

The probe stands in for paged attention: it notes what each layer passes to the AttentionInterface and computes plain
causal attention. When the logits then equal the model's own, the layers mean what paged attention assumes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvboost.attention.interface import attach, detach
from kvboost.attention.math import attend
from kvboost.attention.step import running
from kvboost.cache.layout import LayerShape
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.limits import PAGED_LAYER_TYPES, layer_types, text_config

PROBE_TOKENS = 10

HONOURED = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "dropout"})
"""Arguments of the attention function that paged attention implements."""

HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position",
     "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_router_logits",
     "past_key_values", "cache", "position_embeddings", "logits_to_keep", "num_items_in_batch", "deterministic"}
)  # fmt: skip
"""Arguments that are passed along and do not change what a token attends to in a causal model."""


@dataclass(frozen=True)
class Capabilities:
    """How the engine runs this model, and why.

    path: `paged` (our attention inside the model) or `compat` (the model's own attention over a cache rebuilt from
    slabs). layer_ids: attention module's `layer_idx` to position in `layers`. windows: the sliding windows in use.
    """

    path: str
    reason: str
    layers: tuple[LayerShape, ...]
    layer_ids: dict[int, int]
    windows: tuple[int, ...]
    q_heads: int
    takes_positions: bool
    takes_logits_to_keep: bool
    cache_argument: str


@dataclass(frozen=True)
class _Call:
    shape: LayerShape
    q_heads: int
    window: int | None
    unknown: tuple[str, ...]


class _Probe:
    """A `StepAttention` that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.problem: str | None = None

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.calls:
            self.problem = self.problem or f"{type(module).__name__} has no layer_idx of its own"
        else:
            shape = LayerShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3])
            unknown = tuple(
                sorted(k for k, v in kwargs.items() if v is not None and k not in HONOURED and k not in HARMLESS)
            )
            self.calls[index] = _Call(shape, query.shape[1], kwargs.get("sliding_window"), unknown)
        out = attend(
            query, key, value, mask=None, causal=query.shape[2] > 1,
            scaling=kwargs.get("scaling"), softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"),
        )  # fmt: skip
        return out.transpose(1, 2)


@torch.inference_mode()
def discover(model: PreTrainedModel, path: str = "auto") -> Capabilities:
    """Find out how to run `model`; afterwards its attention is attached to KVBoost exactly when the path is paged.

    Raises `UnsupportedModel` when neither path can serve it, `ConfigError` when `path="paged"` is asked for and cannot be.
    """
    _require_head(model)
    if path != "compat":
        problem = _try_paged(model)
        if isinstance(problem, Capabilities):
            return problem
        detach(model)
        if path == "paged":
            raise ConfigError("path", f"paged was asked for, but {problem}. Use path='auto'.")
    else:
        problem = "path='compat' was asked for"
    return _compat(model, problem)


def _require_head(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for models whose output is not a distribution over the next token."""
    if not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} has no language model head (it cannot generate). Load it as a causal language model."
        )


def _try_paged(model: PreTrainedModel) -> Capabilities | str:
    """Capabilities of the paged path, or why it cannot be taken."""
    strange = sorted(set(layer_types(model.config)) - PAGED_LAYER_TYPES)
    if strange:
        return f"it has layers of type {', '.join(strange)}"
    if not _signature(model)["takes_positions"]:
        return "its forward takes no position_ids: it counts positions by the length of its cache"
    if not attach(model):
        return "its attention does not go through the AttentionInterface of Transformers"
    ids = _probe_ids(model)
    own = model(input_ids=ids, use_cache=False).logits.float()
    probe = _Probe()
    # A mask that hides nothing: without one Transformers looks for packed sequences in the positions, and waits for the
    # device to tell. Layers get none either way.
    mask = torch.ones_like(ids, dtype=torch.bool)
    with running(probe):
        ours = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    if not probe.calls:
        return "its attention does not go through the AttentionInterface of Transformers"
    problem = probe.problem or _calls_problem(model, probe.calls)
    if problem is None and not _close(own, ours):
        problem = "its logits under plain causal attention differ from its own"
    if problem is not None:
        return problem
    ordered = sorted(probe.calls)
    calls = [probe.calls[i] for i in ordered]
    return Capabilities(
        path="paged",
        reason="every attention layer goes through the AttentionInterface of Transformers",
        layers=tuple(call.shape for call in calls),
        layer_ids={index: i for i, index in enumerate(ordered)},
        windows=tuple(sorted({call.window for call in calls if call.window is not None})),
        q_heads=calls[0].q_heads,
        **_signature(model),
    )


def _calls_problem(model: PreTrainedModel, calls: dict[int, _Call]) -> str | None:
    text = text_config(model.config)
    if len(calls) != text.num_hidden_layers:
        return f"only {len(calls)} of its {text.num_hidden_layers} layers call the AttentionInterface"
    unknown = sorted({name for call in calls.values() for name in call.unknown})
    if unknown:
        return f"its layers pass {', '.join(unknown)} to attention, which paged attention does not implement"
    types = layer_types(model.config)
    if types and len(types) == len(calls):
        for index, call in calls.items():
            if (types[index] == "sliding_attention") != (call.window is not None):
                return f"layer {index} is {types[index]} but passes sliding_window={call.window}"
    elif getattr(text, "sliding_window", None) and not types and not any(c.window for c in calls.values()):
        if getattr(text, "use_sliding_window", True):
            return "it has a sliding window that its layers do not pass to attention"
    return None


def _compat(model: PreTrainedModel, reason: str) -> Capabilities:
    """Shapes of the compatibility path, read off a cache the model filled itself."""
    signature = _signature(model)
    cache = DynamicCache()
    ids = _probe_ids(model)
    extra: dict[str, Any] = {"use_cache": True, signature["cache_argument"]: cache}
    first = PROBE_TOKENS // 2
    try:
        whole = model(input_ids=ids, use_cache=False).logits[:, first:].float()
        model(input_ids=ids[:, :first], attention_mask=torch.ones_like(ids[:, :first]), **extra)
        if signature["takes_positions"]:
            extra["position_ids"] = torch.arange(first, PROBE_TOKENS, device=ids.device)[None]
        parts = model(input_ids=ids[:, first:], attention_mask=torch.ones_like(ids), **extra).logits.float()
        shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    except Exception as error:  # whatever a foreign model raises here, it cannot be served
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: {reason}, and it does not run with a DynamicCache ({error})."
        ) from error
    if not shapes or any(k[2] != PROBE_TOKENS or v[2] != PROBE_TOKENS for k, v in shapes):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: {reason}, and its cache does not hold one key and value per token."
        )
    if whole.shape != parts.shape or not _close(whole, parts):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: {reason}, and continuing its own cache gives other logits than "
            "computing the whole text at once (is it causal?)."
        )
    return Capabilities(
        path="compat",
        reason=reason,
        layers=tuple(LayerShape(k[1], k[3], v[1], v[3]) for k, v in shapes),
        layer_ids={i: i for i in range(len(shapes))},
        windows=(),
        q_heads=getattr(text_config(model.config), "num_attention_heads", shapes[0][0][1]),
        **signature,
    )


def _signature(model: PreTrainedModel) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    return {
        "takes_positions": "position_ids" in names,
        "takes_logits_to_keep": "logits_to_keep" in names,
        # Transformers 5.24 renamed `past_key_values` to `cache`, model by model.
        "cache_argument": "cache" if "cache" in names else "past_key_values",
    }


def _probe_ids(model: PreTrainedModel) -> Tensor:
    vocabulary = text_config(model.config).vocab_size
    ids = [(7 * i + 3) % vocabulary for i in range(PROBE_TOKENS)]
    return torch.tensor([ids], device=model.device)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; bf16 logits of deep models differ by a few percent between attention kernels."""
    scale = a.abs().max().clamp_min(1e-6)
    return bool(((a - b).abs().max() / scale) < 0.05)
