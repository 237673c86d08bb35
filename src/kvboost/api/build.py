"""Puts an engine together: how much KV fits, how long sequences may be. Decided once, at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost.attention.backends import Backend, choose
from kvboost.attention.interface import attached, detach
from kvboost.attention.step import running
from kvboost.cache.blocks import BlockPool
from kvboost.cache.layout import SlabLayout
from kvboost.cache.pool import KVPool
from kvboost.config import MAX_NUM_SEQS, EngineConfig
from kvboost.engine.engine import Engine
from kvboost.engine.runner import Runner
from kvboost.engine.scheduler import Scheduler
from kvboost.errors import ConfigError
from kvboost.kernels.native.threads import fit_threads
from kvboost.models.capabilities import Capabilities, discover
from kvboost.models.fingerprint import weights_fingerprint
from kvboost.models.fused.cpu import CpuOps
from kvboost.models.fused.fuse import fuse, unfuse
from kvboost.models.limits import LengthLimit, length_limit, refuse_unsupported
from kvboost.weights.budget import GPU_SPARE_BYTES, free_ram_bytes
from kvboost.weights.plan import GIB
from kvboost.weights.streamer import Streamer, streamer_of

CPU_DEFAULT_KV_BYTES = 2 * GIB
"""KV on a machine without a GPU, unless told otherwise: room for 46,000 tokens of SmolLM2-135M in fp32."""

CPU_SHARE_OF_FREE_MEMORY = 0.25

STEP_TOKENS = 2048
"""Default token budget of a step. On 2 cores a prompt of 1,050 tokens of SmolLM2 takes 1.8 s in one piece and 2.1 s in
pieces of 512; smaller budgets keep decoding sequences from waiting behind long prompts."""

LARGE_GPU_BYTES = 40 * GIB
LARGE_GPU_STEP_TOKENS = 8192
"""On GPUs from this size on: long prompts want large matrix products, and their activations find room."""

VERY_LARGE_GPU_BYTES = 90 * GIB
VERY_LARGE_GPU_SEQS = 512
"""On GPUs from this size on there is room for the KV of so many: 512 requests of 64 tokens behind 2,048 shared ones are answered
1.13 times as fast as with 256 at a time."""

ALONE_FACTOR = 4
"""On these, a prompt that nobody waits behind is prefilled in steps so many times larger: 32k tokens in one piece attend 1.5 times
as fast as in four, where `prompt_attention.cu` does not serve."""


@dataclass(frozen=True)
class Built:
    """A running engine and what was decided on the way."""

    engine: Engine
    runner: Runner
    capabilities: Capabilities
    backend: Backend
    fused: dict[str, int]
    """Modules that run in a fused form, by kind."""
    layout: SlabLayout
    namespace: bytes
    max_model_len: int
    length_limit: LengthLimit
    config: EngineConfig


def build(model: PreTrainedModel, config: EngineConfig) -> Built:
    """Discover what `model` can do, allocate its KV pool and start the loop.

    Raises `UnsupportedModel` or `ConfigError`; the model then has its own attention as before.
    """
    refuse_unsupported(model.config)
    if model.device.type == "cpu":
        fit_threads()
    shared = attached(model)  # another engine serves it already
    try:
        return _build(model, discover(model, config.path), config)
    except BaseException:
        if not shared:
            unfuse(model)
            detach(model)
        raise


def _build(model: PreTrainedModel, capabilities: Capabilities, config: EngineConfig) -> Built:
    limit = length_limit(model.config)
    streamer = streamer_of(model)
    if streamer is not None:
        config = _streaming_config(config, streamer)
    config = config.replace(max_num_seqs=config.max_num_seqs or _default_num_seqs(model.device))
    layout = SlabLayout(
        capabilities.layers, config.block_size, str(model.dtype).removeprefix("torch."), model.dtype.itemsize
    )
    wanted_len = _wanted_length(config.max_model_len, limit)
    step_tokens = config.max_num_batched_tokens or _default_step_tokens(model.device)
    alone_tokens = _tokens_alone(config, model.device, step_tokens)
    num_blocks = _num_blocks(config, layout, model, alone_tokens, streamer)
    max_model_len = _fit_length(config, wanted_len, num_blocks, layout)
    device = model.device
    backend = choose(capabilities.layers, capabilities.q_heads, model.dtype, device, config.compile)
    fused = _fuse(model, capabilities, backend, max_model_len)
    pool = KVPool(layout, num_blocks, model.dtype, device)
    scheduler = Scheduler(
        BlockPool(num_blocks, share=config.enable_prefix_caching),
        config.block_size,
        config.num_seqs,
        step_tokens,
        alone_tokens,
    )
    runner = _runner(model, capabilities, backend, pool, config.num_seqs, alone_tokens)
    engine = Engine(runner, scheduler, config.max_num_waiting)
    return Built(
        engine, runner, capabilities, backend, fused, layout, weights_fingerprint(model) + layout.fingerprint, max_model_len, limit,
        config.replace(max_model_len=max_model_len, num_blocks=num_blocks, max_num_batched_tokens=step_tokens),
    )  # fmt: skip


def _streaming_config(config: EngineConfig, streamer: Streamer) -> EngineConfig:
    """What the streamer's plan reckoned with."""
    return config.replace(
        max_num_batched_tokens=config.max_num_batched_tokens or streamer.budget.step_tokens,
        max_num_seqs=min(config.num_seqs, streamer.budget.max_num_seqs or config.num_seqs),
    )


def _fuse(model: PreTrainedModel, capabilities: Capabilities, backend: Backend, max_model_len: int) -> dict[str, int]:
    if capabilities.path != "paged" or backend.name == "torch":
        return {}
    if backend.name == "native":
        return fuse(model, CpuOps(), max_model_len)
    from kvboost.models.fused.gpu import GpuOps

    return fuse(model, GpuOps(), max_model_len)


def _runner(
    model: PreTrainedModel,
    capabilities: Capabilities,
    backend: Backend,
    pool: KVPool,
    max_num_seqs: int,
    step_tokens: int,
) -> Runner:
    if capabilities.path != "paged" or backend.name != "triton":
        return Runner(model, capabilities, backend, pool)
    from kvboost.engine.gpu_runner import GpuRunner

    return GpuRunner(model, capabilities, pool, max_num_seqs, step_tokens)


def _wanted_length(asked: int | None, limit: LengthLimit) -> int:
    if asked is None:
        return limit.tokens
    if asked > limit.tokens:
        raise ConfigError(
            "max_model_len", f"got {asked}, but this model serves {limit.tokens} tokens ({limit.reason}). Lower it."
        )
    return asked


def _default_step_tokens(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES:
        return LARGE_GPU_STEP_TOKENS
    return STEP_TOKENS


def _tokens_alone(config: EngineConfig, device: torch.device, step_tokens: int) -> int:
    if config.max_num_batched_tokens is not None or device.type != "cuda":
        return step_tokens
    return step_tokens * ALONE_FACTOR if _is_very_large(device) else step_tokens


def _default_num_seqs(device: torch.device) -> int:
    return VERY_LARGE_GPU_SEQS if _is_very_large(device) else MAX_NUM_SEQS


def _is_very_large(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= VERY_LARGE_GPU_BYTES


def _num_blocks(
    config: EngineConfig, layout: SlabLayout, model: PreTrainedModel, step_tokens: int, streamer: Streamer | None
) -> int:
    device = model.device
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_gib is not None:
        available = int(config.kv_cache_gib * GIB)
        field, remedy = "kv_cache_gib", "Raise it"
    elif device.type == "cuda":
        workspace = step_workspace_bytes(model, step_tokens, config.num_seqs) + GPU_SPARE_BYTES
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        available = int(total * config.gpu_memory_utilization) - (total - free) - workspace
        field, remedy = "gpu_memory_utilization", "Raise it, use a smaller dtype, or free GPU memory"
        budget = streamer.budget.nbytes if streamer is not None else (config.vram_budget_gib or 0) * GIB
        if budget:
            available = min(int(budget) - torch.cuda.memory_reserved(device), free) - workspace
            if streamer is not None:  # KV was set aside; of the spare memory the driver holds a part by now
                available = max(available, min(streamer.budget.kv_bytes, free - workspace + GPU_SPARE_BYTES))
            field, remedy = "vram_budget_gib", "Raise it, or lower max_num_batched_tokens or max_num_seqs"
    else:
        available = min(CPU_DEFAULT_KV_BYTES, int(free_ram_bytes() * CPU_SHARE_OF_FREE_MEMORY))
        field, remedy = "kv_cache_gib", "Free memory, or set it"
    num_blocks = available // layout.slab_bytes
    if num_blocks < 2:
        raise ConfigError(
            field,
            f"{max(available, 0) / GIB:.2f} GiB are left for KV, less than two blocks of {layout.slab_bytes / 2**20:.2f} MiB. {remedy}.",
        )
    return num_blocks


def _fit_length(config: EngineConfig, wanted: int, num_blocks: int, layout: SlabLayout) -> int:
    fits = num_blocks * layout.block_size
    if wanted <= fits:
        return wanted
    if config.max_model_len is None:
        return fits
    need = -(-wanted // layout.block_size) * layout.slab_bytes / GIB
    raise ConfigError(
        "max_model_len",
        f"{wanted} tokens need {need:.2f} GiB of KV; {num_blocks * layout.slab_bytes / GIB:.2f} GiB is there. "
        f"Lower max_model_len to {fits}, or set kv_cache_gib={need:.1f}.",
    )


def step_workspace_bytes(model: PreTrainedModel, tokens: int, rows: int) -> int:
    """GPU memory that the largest step takes beside weights and KV: measured on one, with the sampler's copies added.

    Raises `ConfigError` when not even that fits.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(tokens, device=model.device) % vocabulary)[None]
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    try:
        with torch.inference_mode(), running(_WithoutAttention()):
            model.get_decoder()(input_ids=ids, use_cache=False)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            "max_num_batched_tokens",
            f"a step of {tokens} tokens does not fit beside the weights. Lower it, or use a smaller model.",
        ) from error
    # Logits in the model's dtype, then in fp32 and sorted with indices when sampled.
    return torch.cuda.max_memory_allocated(model.device) - before + rows * vocabulary * 16


class _WithoutAttention:
    """A step that attends to nothing: what attention itself takes is small, and depends on the backend."""

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
