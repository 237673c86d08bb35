"""Products with packed weights: the fastest way the device has, and plain torch everywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvboost.kernels.native import linear as native
from kvboost.kernels.triton.support import serves_packed
from kvboost.weights.packing import Packing, in_pieces

UNPACKED_BYTES = 32 << 20
"""Of a weight, unpacked at a time: what is computed with stays small beside the packed bytes."""

REUSED_BYTES = 8 << 20
"""The same on a CPU, in memory that is used again and again: fresh pages cost more than unpacking. Products with smaller
pieces are slower (3,072 x 576 in fp32, 1,000 rows: 10.5 ms, 14.8 ms in pieces of 1 MiB; 50 rows: 1.2 and 1.4 ms)."""

_scratch = threading.local()


def packed_linear(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """`x[rows, k] @ W.T + bias`, in x's dtype; weight is uint8 `[n, packing.row_bytes]`."""
    if native.can_multiply(x, weight):
        piece = native.Piece(weight, bias if bias is None else bias.to(x.dtype), packing)
        if 0 < x.shape[0] <= native.rows_max(x.dtype, [piece]):
            return native.linear(x if x.stride(1) == 1 else x.contiguous(), native.weights_of([piece], x.dtype))
        return _by_pieces(x, weight, packing, piece.bias, REUSED_BYTES, _unpacked_again)
    if serves_packed(x.dtype, weight.device) and not (x.requires_grad and torch.is_grad_enabled()):
        from kvboost.kernels.triton.packed import packed_product

        return packed_product(x, weight, packing, bias if bias is None else bias.to(x.dtype))
    return torch_linear(x, weight, packing, bias)


def torch_linear(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None) -> Tensor:
    """The same on any device, by unpacking a piece of the weight at a time into x's dtype."""
    return _by_pieces(x, weight, packing, bias, UNPACKED_BYTES, unpacked)


def _by_pieces(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, nbytes: int,
    unpack: Callable[[Tensor, Packing, torch.dtype], Tensor],
) -> Tensor:  # fmt: skip
    """Products with pieces of the weight of about `nbytes` once unpacked, each computed before the next is."""
    parts = []

    def piece(start: int, end: int) -> None:
        dense = unpack(weight[start:end], packing, x.dtype)
        parts.append(linear(x, dense, None if bias is None else bias[start:end]))

    in_pieces(weight.shape[0], packing.k * x.element_size(), nbytes, piece)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _unpacked_again(weight: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """On a CPU: `unpacked` in memory of this thread, over what it held before."""
    nbytes = weight.shape[0] * packing.k * dtype.itemsize
    buffer: Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _scratch.buffer = torch.empty(max(nbytes, REUSED_BYTES), dtype=torch.uint8)
    return native.unpack(weight, packing, dtype, out=buffer[:nbytes].view(dtype).view(-1, packing.k))


def unpacked(weight: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """`[n, k]`: a packed weight `[n, packing.row_bytes]` as `dtype`."""
    if native.can_unpack(weight, dtype):
        return native.unpack(weight, packing, dtype)
    if serves_packed(dtype, weight.device):
        from kvboost.kernels.triton.packed import unpack

        return unpack(weight, packing, torch.empty(weight.shape[0], packing.k, dtype=dtype, device=weight.device))
    return packing.dense(weight, dtype)


def looked_up(index: Tensor, weight: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """`[rows, k]`: the rows of a packed weight named by `index[rows]`. Raises IndexError where one is out of range; on a
    GPU, which nothing waits for, such a row is NaN."""
    if native.can_unpack(weight, dtype):
        return native.unpack(weight, packing, dtype, index.long())
    if serves_packed(dtype, weight.device):
        from kvboost.kernels.triton.packed import look_up

        return look_up(index, weight, packing, dtype)
    return packing.dense(weight[index], dtype)
