"""Weights on a CPU, laid out so that matrix products read them at full speed.

Files and converters leave tensors at odd addresses (16 bytes past a cache line is common), and in 4 KiB pages. Here all
weights move into one buffer: each begins at a cache line, and the kernel is asked for huge pages.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvboost.cache.pages import zeroed_buffer

ALIGNMENT_BYTES = 64
"""A cache line, and the width of an AVX-512 load."""


@torch.no_grad()
def settle(model: PreTrainedModel) -> None:
    """Move the parameters of a CPU model into an aligned buffer, one copy at a time; tied weights stay tied.

    The peak is the model once, plus its largest weight, as each old storage is let go when its copy is made.
    """
    parameters = list(dict.fromkeys(model.parameters()))
    if any(p.device.type != "cpu" or not p.is_contiguous() for p in parameters):
        return
    at, offsets = 0, []
    for parameter in parameters:
        offsets.append(at)
        at += -(-parameter.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    arena = zeroed_buffer(at)
    for parameter, offset in zip(parameters, offsets, strict=True):
        place = arena[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
