"""The names under which KVBoost stands in the AttentionInterface of Transformers, and what they do outside a step.

A boosted model stays a model: when no step runs in the calling thread, attention and masks behave exactly as under
the implementation the model had before. That one is part of the registered name, so no state is kept anywhere else.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import logging as transformers_logging

from kvboost.attention.step import current_step

AttentionResult = tuple[Tensor, Tensor | None]

OVER_SDPA = "kvboost"
OVER_EAGER = "kvboost_over_eager"


def attach(model: PreTrainedModel) -> bool:
    """Route the attention of `model` through KVBoost. False when its code does not offer that."""
    if attached(model):
        return True
    name = OVER_EAGER if model.config._attn_implementation == "eager" else OVER_SDPA
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the answer below says it; no need to warn a user about it
    try:
        model.set_attn_implementation(name)
    finally:
        transformers_logging.set_verbosity(verbosity)
    return bool(model.config._attn_implementation == name)


def attached(model: PreTrainedModel) -> bool:
    """Whether the attention of `model` goes through KVBoost."""
    return model.config._attn_implementation in (OVER_SDPA, OVER_EAGER)


def detach(model: PreTrainedModel) -> None:
    """Give `model` back the implementation it had."""
    original = {OVER_SDPA: "sdpa", OVER_EAGER: "eager"}.get(model.config._attn_implementation)
    if original is not None:
        model.set_attn_implementation(original)


def _over_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> AttentionResult:
    step = current_step()
    if step is not None:
        return step.attend(module, query, key, value, **kwargs), None
    result: AttentionResult = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


def _over_eager(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> AttentionResult:
    step = current_step()
    if step is not None:
        return step.attend(module, query, key, value, **kwargs), None
    eager = sys.modules[type(module).__module__].eager_attention_forward  # each model file defines its own
    result: AttentionResult = eager(module, query, key, value, attention_mask, **kwargs)
    return result


def _mask_over_sdpa(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if current_step() is not None else sdpa_mask(*args, **kwargs)


def _mask_over_eager(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if current_step() is not None else eager_mask(*args, **kwargs)


AttentionInterface.register(OVER_SDPA, _over_sdpa)
AttentionInterface.register(OVER_EAGER, _over_eager)
AttentionMaskInterface.register(OVER_SDPA, _mask_over_sdpa)
AttentionMaskInterface.register(OVER_EAGER, _mask_over_eager)
