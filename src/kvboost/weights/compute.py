"""Products with packed weights: the fastest way the device has, and plain torch everywhere else."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from kvboost.weights.packing import Packing, in_pieces

UNPACKED_BYTES = 32 << 20
"""Of a weight, unpacked at a time: what is computed with stays small beside the packed bytes."""


def packed_linear(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """`x[rows, k] @ W.T + bias`, in x's dtype; weight is uint8 `[n, packing.row_bytes]`."""
    return torch_linear(x, weight, packing, bias)


def torch_linear(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """The same on any device, by unpacking a piece of the weight at a time into x's dtype."""
    out = x.new_empty(x.shape[0], weight.shape[0])

    def piece(start: int, end: int) -> None:
        dense = packing.dense(weight[start:end], x.dtype)
        out[:, start:end] = linear(x, dense, None if bias is None else bias[start:end])

    in_pieces(weight.shape[0], packing.k * x.element_size(), UNPACKED_BYTES, piece)
    return out
