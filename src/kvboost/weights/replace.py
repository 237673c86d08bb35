"""The places in a Transformers model where packed weights may stand, and putting them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kvboost.weights.modules import PackedEmbedding, PackedLinear
from kvboost.weights.packing import Packing, in_pieces
from kvboost.weights.stored import PackedRows

Place = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Gives the memory for the parameter of this name, shape and dtype, to be filled; a meta tensor is left as it is."""


def unfilled(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A `Place` for looking at sizes: nothing is filled, nothing is read."""
    return torch.empty(shape, dtype=dtype, device="meta")


PIECE_BYTES = 32 << 20
"""Of a weight in fp32, converted at a time: what loading needs beside the files' tensors and the result."""

ROWS_TOGETHER = 32
"""Pieces are cut at multiples of it: no format packs more rows into one word."""


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute `x W^T + b` and nothing else, by name: `nn.Linear`, and GPT-2's `Conv1D` (W transposed)."""
    for name, module in model.named_modules():
        if is_transposed(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward):
            yield name, module


def is_transposed(module: nn.Module) -> bool:
    """Whether the module's weight is `[inputs, outputs]`."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def linear_shape(linear: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of one of `linears`."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def scale_of(table: nn.Module) -> float | None:
    """What a token embedding multiplies its rows by, in its dtype; None for a plain one.

    Raises ValueError for an embedding that does something else, which packed rows cannot stand for.
    """
    if type(table).forward is nn.Embedding.forward and getattr(table, "max_norm", None) is None:
        return None
    scale = getattr(table, "embed_scale", None)
    if isinstance(scale, Tensor) and scale.numel() == 1 and type(table).__name__.endswith("ScaledWordEmbedding"):
        return float(scale)
    raise ValueError(f"{type(table).__name__} is no plain embedding")


def is_plain_table(table: nn.Module) -> bool:
    """Whether packed rows can stand for this embedding."""
    try:
        scale_of(table)
    except ValueError:
        return False
    return isinstance(table, nn.Embedding)


def name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, found in model.named_modules() if found is module)


def fill(packed: PackedRows, n: int, out: Tensor) -> Tensor:
    """All n rows into `out`, uint8 `[n, row_bytes]`, some at a time; nothing is read for a meta tensor."""

    def piece(start: int, end: int) -> None:
        out[start:end] = packed.rows(start, end)

    if not out.is_meta:
        _in_pieces(n, packed.packing.k, piece)
    return out


def unpack(packed: PackedRows, n: int, out: Tensor) -> None:
    """All n rows as plain numbers into `out`, `[n, k]`, some at a time."""

    def piece(start: int, end: int) -> None:
        out[start:end] = packed.packing.dense(packed.rows(start, end), out.dtype)

    _in_pieces(n, packed.packing.k, piece)


def _in_pieces(n: int, k: int, work: Callable[[int, int], None]) -> None:
    def piece(start: int, end: int) -> None:
        work(start * ROWS_TOGETHER, min(n, end * ROWS_TOGETHER))

    in_pieces(-(-n // ROWS_TOGETHER), k * 4 * ROWS_TOGETHER, PIECE_BYTES, piece)


def put_packed(model: nn.Module, names: Sequence[str], rows: Tensor, packing: Packing, dtype: torch.dtype) -> None:
    """Put packed modules with one and the same weight where the parameters `names` are, with the same biases and scales.

    rows: uint8 `[n, row_bytes]`. dtype: of what an embedding looks up.
    """
    weight = nn.Parameter(rows, requires_grad=False)
    for name in names:
        path = name.rpartition(".")[0]
        parent, _, leaf = path.rpartition(".")
        new = packed_twin(model.get_submodule(path), weight, packing, dtype)
        setattr(model.get_submodule(parent), leaf, new)


def packed_twin(module: nn.Module, weight: nn.Parameter, packing: Packing, dtype: torch.dtype) -> nn.Module:
    """What stands for a linear or a plain embedding whose weight is packed. dtype: of what an embedding looks up."""
    new: nn.Module
    if isinstance(module, nn.Embedding):
        new = PackedEmbedding(weight, packing, dtype, scale_of(module))
    else:
        new = PackedLinear(weight, packing, module._parameters.get("bias"))
    return new.train(module.training)


def same_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter and persistent buffer, in the order of the model; a tied one has several."""
    same: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(id(tensor), []).append(name)
    return list(same.values())
