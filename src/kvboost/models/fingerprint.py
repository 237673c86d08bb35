"""A name for a model's weights: what must be equal before stored KV may be used again."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from kvboost.weights.streamer import present_parameters

SAMPLES_PER_TENSOR = 64
"""Strided elements read from each weight: enough to tell fine-tunes apart, cheap for 70B parameters."""


@torch.inference_mode()
def weights_fingerprint(model: PreTrainedModel) -> bytes:
    """16 bytes over the config and samples of every parameter; equal in every process for equal weights."""
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "architectures"):
        config.pop(volatile, None)
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, module in sorted(model.named_modules()):
        packing = getattr(module, "packing", None)
        if packing is not None:
            digest.update(f"{name}{packing}".encode())
    for _, sample in sorted((name, _sample(name, parameter)) for name, parameter in present_parameters(model)):
        digest.update(sample)
    return digest.digest()


def _sample(name: str, parameter: torch.Tensor) -> bytes:
    described = f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode()
    if parameter.device.type == "meta":
        return described
    flat = parameter.detach().reshape(-1)
    # Odd: packed rows are multiples of 16 bytes long, and samples are to come from all parts of a row.
    step = max(1, flat.numel() // SAMPLES_PER_TENSOR) | 1
    return described + flat[::step][:SAMPLES_PER_TENSOR].float().cpu().numpy().tobytes()
