"""Models of a real shape with random packed weights, made in seconds: they cost what trained ones cost."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.bench.shapes import config_of
from kvboost.weights.packing import Packing, Scheme
from kvboost.weights.replace import Place, linears, put_packed
from kvboost.weights.skeleton import build_skeleton

GROUP = 128
PATTERN_ROWS = 256
"""Rows of random weights of one length; a matrix repeats them. Memory does not know."""


def packed_model(
    shape: str, place: Place | None = None, device: str = "cuda", dtype: torch.dtype = torch.float16
) -> PreTrainedModel:
    """A model whose decoder layers have 4-bit weights in groups of 128 and whose other parameters are `dtype`.

    place: gives the memory of a parameter; a meta tensor is not filled. By default it is taken on `device`.
    """
    model = build_skeleton(config_of(shape), dtype, torch.device(device))
    place = place or partial(_on, torch.device(device))
    patterns: dict[int, Tensor] = {}
    packed = set()
    for name, linear in list(linears(model)):
        if ".layers." not in name:
            continue
        n, k = linear.get_parameter("weight").shape
        packing = Packing(Scheme.ZEROS, 4, k, GROUP)
        weight = place(f"{name}.weight", (n, packing.row_bytes), torch.uint8)
        if not weight.is_meta:
            if k not in patterns:
                patterns[k] = _pattern(packing).to(weight.device)
            for rows in weight.split(PATTERN_ROWS):
                rows.copy_(patterns[k][: len(rows)])
        put_packed(model, [f"{name}.weight"], weight, packing, dtype)
        packed.add(f"{name}.weight")
    for name, parameter in list(model.named_parameters()):
        if name in packed:
            continue
        value = place(name, tuple(parameter.shape), parameter.dtype)
        if not value.is_meta:
            value.fill_(1.0) if "norm" in name else value.zero_() if name.endswith("bias") else value.normal_(0, 0.02)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    return model


def _pattern(packing: Packing) -> Tensor:
    """Codes around the zero point: a mean that is not zero would grow from layer to layer, beyond what fp16 holds."""
    codes = torch.randint(1, 16, (PATTERN_ROWS, packing.k), dtype=torch.uint8)
    scales = torch.full((PATTERN_ROWS, packing.groups), 0.2 / packing.k**0.5, dtype=torch.float16)
    return packing.pack(codes, scales, torch.full((PATTERN_ROWS, packing.groups), 8, dtype=torch.uint8))


def _on(device: torch.device, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
