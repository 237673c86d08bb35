"""Modules that hold packed weights and stand where a model had an `nn.Linear` or an `nn.Embedding`.

The bytes are a Parameter that is never trained: what walks a model's parameters (moving, fingerprints, streaming) finds
them, and `module.to(dtype)` leaves them alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvboost.weights.compute import looked_up, packed_linear
from kvboost.weights.packing import Packing


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W packed.

    weight: uint8 `[out_features, packing.row_bytes]`. bias: `[out_features]` or None. The product has x's dtype.
    """

    def __init__(self, weight: Tensor | nn.Parameter, packing: Packing, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packing = packing
        self.weight = _parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def in_features(self) -> int:
        return self.packing.k

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows = packed_linear(input.reshape(-1, input.shape[-1]), self.weight, self.packing, self.bias)
        return rows.view(*input.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.packing}"


class PackedEmbedding(nn.Module):
    """Rows of a packed table, unpacked as they are looked up.

    weight: uint8 `[num_embeddings, packing.row_bytes]`. dtype: of what is looked up. scale: multiplied in, in that dtype,
    as Gemma's embedding does.
    """

    def __init__(
        self, weight: Tensor | nn.Parameter, packing: Packing, dtype: torch.dtype, scale: float | None = None
    ) -> None:
        super().__init__()
        self.packing, self.dtype, self.scale = packing, dtype, scale
        # Rounded here, on the host: a tensor made in `forward` would be a copy that no CUDA graph can capture.
        self._factor = 1.0 if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        self.weight = _parameter(weight)

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.packing.k

    def forward(self, input: Tensor) -> Tensor:
        """`[...]` token ids to `[..., embedding_dim]`."""
        rows = looked_up(input.reshape(-1), self.weight, self.packing, self.dtype)
        if self.scale is not None:
            rows = rows * self._factor
        return rows.view(*input.shape, -1)


def _parameter(weight: Tensor | nn.Parameter) -> nn.Parameter:
    """The parameter itself when given one, so that a head tied to its embedding stays tied."""
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
