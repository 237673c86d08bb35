"""How much memory a model may take, where, and what of it KV and workspace need. Estimates, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.models.limits import length_limit, text_config
from kvboost.weights.plan import GIB

KV_TOKENS = 4096
"""Tokens of KV that a GPU's budget sets aside unless told otherwise. What layers leave over comes on top."""

TOKENS_PER_SEQUENCE = 128
"""More sequences than would get so many tokens each are not run at once: the sampler has a row of logits for each."""

STEP_TOKENS = 4096
"""Budget of a step. Each step costs a sweep, so a long prompt is computed in few, large pieces."""

STEP_SHARE = 1 / 16
"""Of a GPU's budget that a step's activations may take at most; its tokens are halved until they do."""

MIN_STEP_TOKENS = 256

GPU_SPARE_BYTES = GIB // 2
"""Beside weights, KV and the workspace of a step: CUDA graphs, sampling, fragmentation."""

SHARE_OF_FREE_RAM = 0.8
"""That streamed layers may take on the host of a GPU unless told otherwise; the others come from disk."""


@dataclass(frozen=True)
class Budget:
    """field: what the user sets to change it. nbytes: for weights, KV and workspace together. host_bytes: for streamed
    layers in RAM; None where they come from disk. step_tokens, max_num_seqs: what the workspace was planned for."""

    field: str
    nbytes: int
    kv_bytes: int = 0
    workspace_bytes: int = 0
    host_bytes: int | None = None
    step_tokens: int = STEP_TOKENS
    max_num_seqs: int | None = None


def budget_of(config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device) -> Budget:
    """The budget that `config` sets, or on a GPU what is free. Raises `ConfigError`."""
    asked = config.weights_budget_gib
    if device.type != "cuda":
        if config.vram_budget_gib is not None:
            raise ConfigError(
                "vram_budget_gib", "this model runs on the CPU. Use weights_budget_gib, or device='cuda'."
            )
        assert asked is not None
        return Budget("weights_budget_gib", int(asked * GIB))
    nbytes = _gpu_bytes(config, device)
    kv_tokens = min(config.max_model_len or length_limit(model_config).tokens, KV_TOKENS)
    kv_bytes = kv_tokens * kv_bytes_per_token(model_config, dtype)
    if config.num_blocks is not None:
        kv_bytes = config.num_blocks * config.block_size * kv_bytes_per_token(model_config, dtype)
    elif config.kv_cache_gib is not None:
        kv_bytes = int(config.kv_cache_gib * GIB)
    kv_tokens = kv_bytes // max(1, kv_bytes_per_token(model_config, dtype))
    seqs = max(1, min(config.num_seqs, kv_tokens // TOKENS_PER_SEQUENCE))
    step_tokens = config.max_num_batched_tokens or STEP_TOKENS
    while (
        config.max_num_batched_tokens is None
        and step_tokens > MIN_STEP_TOKENS
        and activation_bytes(model_config, dtype, step_tokens) > nbytes * STEP_SHARE
    ):
        step_tokens //= 2
    logits = seqs * text_config(model_config).vocab_size * 16  # as in api/build.py
    workspace = activation_bytes(model_config, dtype, step_tokens) + logits + GPU_SPARE_BYTES
    host_bytes = int(free_ram_bytes() * SHARE_OF_FREE_RAM if asked is None else asked * GIB)
    return Budget("vram_budget_gib", nbytes, kv_bytes, workspace, host_bytes, step_tokens, seqs)


def _gpu_bytes(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    if config.vram_budget_gib is None:
        return int(total * config.gpu_memory_utilization) - (total - free)
    nbytes = int(config.vram_budget_gib * GIB)
    if nbytes > free:
        raise ConfigError(
            "vram_budget_gib",
            f"got {config.vram_budget_gib}, but {free / GIB:.2f} GiB of the GPU are free. Lower it, or leave it out.",
        )
    return nbytes


def kv_bytes_per_token(model_config: Any, dtype: torch.dtype) -> int:
    """Keys and values of all layers, by the config."""
    text = text_config(model_config)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * dim * dtype.itemsize)


def activation_bytes(model_config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Of the widest moment of a decoder layer: gate and up and their product, and some rows of the hidden size."""
    text = text_config(model_config)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(tokens * (3 * inner + 6 * text.hidden_size) * dtype.itemsize)


def free_ram_bytes() -> int:
    """Memory that can be taken without swapping; the container's limit counts where there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        limit, used = (_read_int(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit is not None and used is not None:
            free = min(free, limit - used)
    except (OSError, StopIteration, ValueError):
        pass
    return free


def _read_int(path: str) -> Any:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
