"""Round-to-nearest: plain weights to int8 or int4 as they are loaded, without calibration.

- `int8`: one fp32 scale per row, symmetric. Linears, head and embedding.
- `int4`: groups of 128, 64 or 32 (the largest that divides the inputs) with an fp16 scale and a zero. The head and the
  embedding take int8 as above (docs/weights.md says why, with figures).

Norms, biases and whatever is no plain linear stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.errors import ModelLoadError
from kvboost.weights.packing import RUN, Packing, Scheme
from kvboost.weights.replace import (
    fill,
    is_plain_table,
    is_transposed,
    linear_shape,
    linears,
    name_of,
    put_packed,
    same_parameters,
)
from kvboost.weights.stored import PackedRows

log = logging.getLogger("kvboost")

KINDS = ("int8", "int4")

GROUPS = (128, 64, 32)

LEVELS = 15
"""Greatest 4-bit code."""


def packing_of(kind: str, k: int, table: bool = False) -> Packing | None:
    """How a row of k weights is packed; table: of the head or the embedding. None when it must stay dense."""
    if k % RUN:
        return None
    if kind == "int8" or table:
        return Packing(Scheme.SYMMETRIC, 8, k, k, scale_bytes=4)
    return Packing(Scheme.ZEROS, 4, k, next(group for group in GROUPS if k % group == 0))


def rounded(name: str, read: Callable[[int, int], Tensor], packing: Packing) -> PackedRows:
    """read: rows `[end - start, k]` of the weight `name`. Its rows raise `ModelLoadError` for values that are not finite."""

    def rows(start: int, end: int) -> Tensor:
        weight = read(start, end).float()
        if not bool(torch.isfinite(weight).all()):
            raise ModelLoadError(f"{name} has values that are not finite: it cannot be rounded. Use weights='dense'.")
        if packing.bits == 8:
            return packing.pack(*symmetric_codes(weight))
        grouped = weight.view(end - start, -1, packing.group)
        return packing.pack(*zero_codes(name, grouped, *grouped.aminmax(dim=-1)))

    return PackedRows(packing, rows)


def symmetric_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes `[n, k]` and fp32 scales `[n, 1]` of fp32 `[n, k]`."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    scales = torch.where(scales > 0, scales, 1.0)
    return (weight / scales).round_().clamp_(-127, 127).to(torch.int8), scales


def zero_codes(name: str, weight: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[n, k]` (uint8, 0 to 15), fp16 scales and zeros (uint8), each `[n, groups]`, of fp32 `[n, groups, group]`.

    low, high: `[n, groups]`, the range that the codes cover; it is widened to hold 0, which many weights are. Raises
    `ModelLoadError` naming the weight when fp16 cannot hold a scale.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = ((high - low) / LEVELS).half()
    if not bool(torch.isfinite(scales).all()):
        raise ModelLoadError(f"{name} has weights too large for 4-bit groups with fp16 scales. Use weights='int8'.")
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    step = scales.float().unsqueeze(-1)  # rounded first: the codes then fit the scales that are stored
    zeros = (-low.unsqueeze(-1) / step).round_().clamp_(0, LEVELS)
    codes = (weight / step).round_().add_(zeros).clamp_(0, LEVELS)
    return codes.to(torch.uint8).flatten(1), scales, zeros.squeeze(-1).to(torch.uint8)


def round_plan(model: PreTrainedModel, kind: str) -> dict[str, Packing]:
    """How each weight that is rounded will be packed, by the parameter's name; a tied one is there under all its names."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    plan, dense = {}, []
    for name, module in linears(model):
        packing = packing_of(kind, linear_shape(module)[1], table=module is head)
        if packing is None:
            dense.append(name)
        else:
            plan[f"{name}.weight"] = packing
    if dense:
        log.warning("%d linears stay dense, %s for one: their inputs are no multiple of %d.", len(dense), dense[0], RUN)
    packing = packing_of(kind, table.weight.shape[-1], table=True)
    if packing is not None and is_plain_table(table):
        plan[f"{name_of(model, table)}.weight"] = packing
    return plan


@torch.no_grad()
def round_model(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Round the weights of a loaded model one by one: each dense one is let go before the next is packed."""
    plan = round_plan(model, kind)
    for names in same_parameters(model):
        wanted = [name for name in names if name in plan]
        if wanted:
            weight, dtype = model.get_parameter(wanted[0]).detach(), model.dtype
            transposed = is_transposed(model.get_submodule(wanted[0].rpartition(".")[0]))
            rows = weight.T if transposed else weight
            packed = rounded(wanted[0], lambda start, end, rows=rows: rows[start:end], plan[wanted[0]])  # type: ignore[misc]
            out = torch.empty(rows.shape[0], packed.packing.row_bytes, dtype=torch.uint8, device=rows.device)
            put_packed(model, wanted, fill(packed, rows.shape[0], out), packed.packing, dtype)
    return model
