"""How tiny random models are built. Knows Transformers, nothing of KVBoost.

Weights are drawn again after construction: with the stock initialiser (std 0.02) a tiny model repeats one token,
and a wrong cache would go unseen. Windows are small and divide no block size, so every sequence outgrows them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 160
HIDDEN = 48
LAYERS = 2
MAX_POSITIONS = 512
WINDOW = 24
ROPE_THETA = 10000.0
GEMMA_STD = 0.02
"""Gemma multiplies its embeddings by sqrt(hidden size)."""

SHORT_FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG_FACTORS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
"""Longrope divides each of the 6 rotary frequencies by its factor."""

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
"""Options that most modern decoders share: 4 query heads on 2 KV heads of 12."""

GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
}

_NO_SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """One served architecture. path: `paged` when every attention layer calls Transformers' interface, else `compat`.

    window: the smallest sliding window in tokens. exact_len: beyond this many tokens Transformers itself rotates keys
    differently (length-dependent rope), so cached keys stop being the ones it would compute.
    """

    name: str
    build: Callable[[], PreTrainedModel]
    path: str = "paged"
    window: int | None = None
    exact_len: int | None = None
    notes: str = ""

    def __str__(self) -> str:
        return self.name


def _draw_weights(model: PreTrainedModel, seed: int, gain: float, embedding_std: float) -> None:
    """Draw every parameter again: matrices N(0, gain / sqrt(fan in)), vectors shifted by N(0, 0.1).

    Biases, norms and sinks all get values, so that a path which forgets one of them is seen. Small embeddings leave
    most of the residual stream to attention: a token 10 places back then moves the logits by 10% or more.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(noise)
            elif parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_(embedding_std * noise)
            else:
                parameter.copy_(noise * (gain / math.sqrt(parameter.shape[-1])))


def tiny(
    class_name: str,
    config_name: str,
    *,
    seed: int = 1,
    gain: float = 1.6,
    embedding_std: float = 0.15,
    **options: Any,
) -> PreTrainedModel:
    """A random fp32 model in eval mode that never stops by itself.

    Special token ids are cleared in the model and its generation_config; padding is token 0.
    """
    config = getattr(transformers, config_name)(**{**_NO_SPECIAL, **options})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, class_name)(config).float().eval()
    _draw_weights(model, seed, gain, embedding_std)
    for target in (model.config, getattr(model, "generation_config", None)):  # a classifier has none
        if target is not None:
            target.eos_token_id = None
            target.pad_token_id = 0
    return model


def decoder(prefix: str, *, config: str | None = None, model: str | None = None, **options: Any) -> Callable[[], Any]:
    """A builder of `{prefix}ForCausalLM` from the shared decoder options, changed by `options`."""
    merged = {**DECODER, **options}
    return lambda: tiny(model or f"{prefix}ForCausalLM", config or f"{prefix}Config", **merged)


def other(model: str, config: str, **options: Any) -> Callable[[], Any]:
    return lambda: tiny(model, config, **options)


def interface_path(module: str) -> str:
    """`paged` where this Transformers release sends the module's attention through the interface (GPT-J: not in 5.17)."""
    names = vars(importlib.import_module(f"transformers.models.{module}"))
    return "paged" if "ALL_ATTENTION_FUNCTIONS" in names else "compat"


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": ROPE_THETA, **options}


def falcon(**options: Any) -> Callable[[], Any]:
    shared = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    shared.update(max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=False, bias=True)
    return other("FalconForCausalLM", "FalconConfig", **shared, **options)


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
