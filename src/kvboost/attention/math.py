"""Attention over dense tensors, with every option the paged path honours. The reference for all kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool = False,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention.

    query `[N, Hq, T, D]`, key `[N, Hkv, L, D]`, value `[N, Hkv, L, Dv]`; mask: added to the
    scores, `[N, 1, T, L]`, 0 where seen and -inf elsewhere; `causal` (with mask None) means query t sees keys 0..t. softcap: `c * tanh(s / c)`
    on scaled scores (Gemma 2). sinks `[Hq]`: a logit per head that takes part in the softmax and has no value (gpt-oss).
    Returns `[N, Hq, T, Dv]`.
    """
    groups = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        if query.shape[2] == 1 and groups > 1:  # the query heads of a group are rows of one product: K is read once
            packed = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
            out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
            return out.reshape(query.shape[0], query.shape[1], 1, value.shape[3])
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
    return _explicit(query, key, value, mask, causal, scaling, softcap, sinks)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    num, q_heads, length, dim = query.shape
    kv_heads = key.shape[1]
    groups = q_heads // kv_heads
    packed = query.reshape(num, kv_heads, groups * length, dim)
    scores = torch.matmul(packed, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
    scores = scores.view(num, kv_heads, groups, length, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.full((1, 1, length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    scores = scores.float()
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, groups, 1, 1).expand(num, -1, -1, length, 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = weights.to(value.dtype).view(num, kv_heads, groups * length, -1)
    return torch.matmul(weights, value).view(num, q_heads, length, -1)
