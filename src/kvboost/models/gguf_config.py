"""What a GGUF file says about its model and Transformers leaves out of the config: head sizes and rotary scaling.

Without them Llama 3.1 and later, Phi-3 with 128k and scaled Gemma 3 or Qwen files would load and answer wrongly.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from kvboost.weights.gguf_cursor import damaged
from kvboost.weights.gguf_reader import GGUFFile

log = logging.getLogger("kvboost")

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama of 3.1 and later was trained with; only `factor` differs. Files hold its result, a factor per pair."""


def amend(config: Any, file: GGUFFile) -> None:
    """Complete the config that Transformers read from `file`. Raises `ModelLoadError` for values that make no sense."""
    architecture = file.architecture
    head_dim = file.metadata.get(f"{architecture}.attention.key_length")
    if head_dim is not None and isinstance(getattr(config, "head_dim", None), int):
        config.head_dim = head_dim
    scaling = _scaling(config, file, f"{architecture}.rope.scaling.")
    if scaling:
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)  # Gemma 3 scales its global layers only
        rope.update(scaling)


def _scaling(config: Any, file: GGUFFile, prefix: str) -> dict[str, Any]:
    kind = file.metadata.get(prefix + "type", "none")
    trained = file.metadata.get(prefix + "original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        if not _is_count(trained):
            damaged(file.path, prefix + "original_context_length", f"is {trained!r}, but there are rope_factors_long")
        config.original_max_position_embeddings = trained
        long, short = (_factors(config, file, f"rope_factors_{name}.weight") for name in ("long", "short"))
        return {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist(),
                "original_max_position_embeddings": trained, **_attention_factor(file, prefix)}  # fmt: skip
    if "rope_freqs.weight" in file.tensors:
        return _as_llama3(config, _factors(config, file, "rope_freqs.weight"))
    if kind == "none":
        return {}
    factor = file.metadata.get(prefix + "factor")
    if not isinstance(factor, float) or not 0 < factor < 1e6:
        damaged(file.path, prefix + "factor", f"is {factor!r}, but {prefix}type is {kind!r}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if not _is_count(trained):
            damaged(file.path, prefix + "original_context_length", f"is {trained!r}, but {prefix}type is yarn")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    log.warning("%s: %stype is %r, which is not applied: long texts may go wrong.", file.path.name, prefix, kind)
    return {}


def _factors(config: Any, file: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the frequency of each rotary pair is divided by."""
    info = file.tensors.get(name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if info is None or info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > head_dim:
        damaged(file.path, f"tensor {name!r}", "is missing" if info is None else f"is {info.type.name} {info.shape}")
    with file.open() as data:
        values: np.ndarray[Any, np.dtype[np.float32]] = data.whole(info).view(np.float32).reshape(-1)
    if not np.isfinite(values).all() or values.min() <= 0:
        damaged(file.path, f"tensor {name!r}", "has factors that are not above 0")
    return values


def _as_llama3(config: Any, factors: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
    factor = float(factors.max())
    if factor <= 1:
        return {}
    pairs = np.arange(len(factors), dtype=np.float64) / len(factors)
    waves = 2 * np.pi * config.rope_parameters["rope_theta"] ** pairs
    trained, low, high = (
        LLAMA3["original_max_position_embeddings"],
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
    )
    share = np.clip((trained / waves - low) / (high - low), 0, 1)
    if np.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-3):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    listed = factors.tolist()  # the same factors at every length
    return {"rope_type": "longrope", "long_factor": listed, "short_factor": listed, "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings}  # fmt: skip


def _attention_factor(file: GGUFFile, prefix: str) -> dict[str, float]:
    value = file.metadata.get(prefix + "attn_factor")
    return {"attention_factor": value} if isinstance(value, float) and 0 < value < 100 else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
