"""A step over no pool: plain causal attention over its own tokens, against which fused forms are proved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvboost.attention.math import attend


class ReferenceStep:
    """Answers `attend`, and with `packed` also `attend_packed`; remembers heads and options of the last call.

    The window is not applied: what is proved is that a fused form passes the same options on.
    """

    def __init__(self, packed: bool) -> None:
        self.heads: tuple[int, int, int] | None = None
        """Query heads, KV heads, and the dimension of a key."""
        self.options: dict[str, Any] = {}
        if packed:
            self.attend_packed = self._attend_packed

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Shapes as in `StepAttention.attend`."""
        self.heads = query.shape[1], key.shape[1], query.shape[3]
        self.options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux,
                        "k_heads": key.shape[1], "v_dim": value.shape[3]}  # fmt: skip
        out = attend(
            query, key, value, mask=None, causal=query.shape[2] > 1, scaling=scaling, softcap=softcap, sinks=s_aux
        )
        return out.transpose(1, 2)

    def _attend_packed(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_heads: int,
        rotary: tuple[Tensor, Tensor] | None,
        *,
        v_dim: int,
        k_heads: int,
        **options: Any,
    ) -> Tensor:
        rows = qkv.shape[0]
        dim = (qkv.shape[1] - k_heads * v_dim) // (q_heads + k_heads)
        q, k, v = qkv.split((q_heads * dim, k_heads * dim, k_heads * v_dim), dim=1)
        q, k, v = (
            x.reshape(1, rows, heads, -1).transpose(1, 2) for x, heads in ((q, q_heads), (k, k_heads), (v, k_heads))
        )
        if rotary is not None:
            q, k = (_rotate(x, *rotary) for x in (q, k))
        return self.attend(torch.nn.Identity(), q, k, v, **options)[0]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation layout over the first dims of `x[1, H, T, D]`, as many as `cos[T, R]` has."""
    width = cos.shape[1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-b, a), dim=-1) * sin, rest), dim=-1)
