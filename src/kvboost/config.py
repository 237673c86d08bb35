"""EngineConfig: every engine option, once. CLI flags, server flags and the docs are derived from its fields.

Field names follow vLLM's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvboost.errors import ConfigError

KV_CACHE_DTYPES = ("auto",)
"""Formats of stored KV. `auto` is the model's dtype."""

PATHS = ("auto", "paged", "compat")

MAX_NUM_SEQS = 256
"""Default of `max_num_seqs` where there is no large GPU."""

WEIGHTS = ("auto", "dense", "int8", "int4")
"""How weights are held. `auto` is as the model's files hold them: packed files stay packed. `int8` and `int4` round plain
weights as they are loaded."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Frozen: use `config.replace(...)` to derive another.

    Raises `ConfigError` naming the field when a value is out of range.
    """

    block_size: int = _option(16, "Tokens per KV block: the unit of allocation and sharing (8, 16, 32, 64 or 128).")
    max_model_len: int | None = _option(
        None, "Longest sequence in tokens, prompt and output together. Default: the model's own limit."
    )
    max_num_seqs: int | None = _option(
        None, "Most sequences running in one step. Default: 256; 512 on GPUs with 90 GiB and more."
    )
    max_num_batched_tokens: int | None = _option(
        None,
        "Token budget of one step; longer prompts are prefilled in chunks. Default: 2048; 4096 when layers are streamed.",
    )
    max_num_waiting: int = _option(4096, "Most requests waiting; one more is refused with EngineBusy.")
    kv_cache_gib: float | None = _option(
        None, "GiB of device memory for KV. Default: on GPU what gpu_memory_utilization leaves, on CPU 2 GiB at most."
    )
    num_blocks: int | None = _option(None, "Size of the KV pool in blocks; overrides kv_cache_gib.")
    gpu_memory_utilization: float = _option(0.9, "Share of GPU memory for weights, workspace and KV together.")
    kv_cache_dtype: str = _option("auto", "Format of stored KV: auto (the model's dtype).")
    enable_prefix_caching: bool = _option(True, "Find the KV of shared prefixes again instead of computing it.")
    compile: bool = _option(
        True, "Use kernels compiled for this machine (C++ on CPUs, needs g++ once); without, plain PyTorch."
    )
    path: str = _option(
        "auto", "How the model is run: auto, paged (AttentionInterface), or compat (its own attention)."
    )
    weights: str = _option(
        "auto",
        "How weights are held: auto (packed files stay packed), dense (unpacked into dtype at load), "
        "int8 or int4 (plain ones are rounded at load).",
    )
    vram_budget_gib: float | None = _option(
        None,
        "GiB of GPU memory for weights, KV and workspace together; layers that do not fit are streamed from RAM. "
        "Default: all layers stay, and when the model does not fit, what gpu_memory_utilization allows.",
    )
    weights_budget_gib: float | None = _option(
        None,
        "GiB of RAM for weights. On a CPU: layers that do not fit are streamed from disk (default: all stay). "
        "On a GPU: for streamed layers, the others come from disk (default: what RAM is free).",
    )
    seed: int = _option(0, "Seed from which requests without their own seed derive theirs.")

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(
                "block_size", f"got {self.block_size}; allowed: 8, 16, 32, 64, 128. Use 16 unless measured."
            )
        _require_positive_int("max_num_waiting", self.max_num_waiting)
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_blocks"):
            if getattr(self, name) is not None:
                _require_positive_int(name, getattr(self, name))
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError("num_blocks", f"got {self.num_blocks}; at least 2 blocks are needed.")
        for name in ("kv_cache_gib", "vram_budget_gib", "weights_budget_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(name, f"got {value}; it must be above 0.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization", f"got {self.gpu_memory_utilization}; allowed: above 0, up to 1."
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                "kv_cache_dtype", f"got {self.kv_cache_dtype!r}; this version stores KV as one of {KV_CACHE_DTYPES}."
            )
        if self.path not in PATHS:
            raise ConfigError("path", f"got {self.path!r}; allowed: {', '.join(PATHS)}.")
        if self.weights not in WEIGHTS:
            raise ConfigError("weights", f"got {self.weights!r}; allowed: {', '.join(WEIGHTS)}.")

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, or its default where there is no large GPU."""
        return self.max_num_seqs or MAX_NUM_SEQS

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    @classmethod
    def from_kwargs(cls, **options: Any) -> EngineConfig:
        """Build from keyword arguments; an unknown name raises `ConfigError` that lists close matches."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                import difflib

                close = difflib.get_close_matches(name, known, n=3)
                hint = f" Did you mean {' or '.join(close)}?" if close else f" Options: {', '.join(sorted(known))}."
                raise ConfigError(name, f"unknown engine option.{hint}")
        return cls(**options)


def _require_positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, f"got {value!r}; it must be a whole number of at least 1.")
