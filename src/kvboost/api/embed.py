"""Embeddings: the last hidden state of a model, pooled over the tokens of each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvboost.api.kvboost import KVBoost
from kvboost.errors import InvalidRequest, PromptTooLong

POOLINGS = ("mean", "last")


def batches(prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts to be computed together: neighbours in length, at most `max_tokens` with their padding."""
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if batch and len(prompts[i]) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def check_embeddable(kv: KVBoost, prompts: Sequence[Sequence[int]], field: str = "input") -> None:
    """Raise `PromptTooLong` or `InvalidRequest` for the first prompt that cannot be embedded."""
    for i, ids in enumerate(prompts):
        where = field if len(prompts) == 1 else f"{field}[{i}]"
        if not ids:
            raise InvalidRequest(where, "is empty; give at least one token.")
        if len(ids) > kv.max_model_len:
            raise PromptTooLong(where, f"has {len(ids)} tokens; max_model_len is {kv.max_model_len}. Split the text.")


def embed_batch(model: Any, prompts: Sequence[Sequence[int]], pooling: str) -> Tensor:
    """Unit vectors `[n, hidden]` (fp32, on the CPU) of some prompts, in one call of the model.

    Run it in the engine's thread (`Engine.call`): the model has one user at a time. Raises `InvalidRequest` for a model
    that does not give its last hidden state.
    """
    longest = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[*p, *([0] * (longest - len(p)))] for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(longest, device=device) < lengths[:, None]
    with torch.inference_mode():
        output = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            raise InvalidRequest("model", f"{type(model).__name__} does not give its last hidden state.")
        hidden = hidden.float()
        if pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        else:
            pooled = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return torch.nn.functional.normalize(pooled, dim=-1).cpu()
