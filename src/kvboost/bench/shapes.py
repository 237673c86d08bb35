"""Configurations of well-known models, by the sizes their makers publish, for benches with random weights."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 27_648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "rope_theta": 1e6,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 5e5,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 1024, "query_pre_attn_scalar": 256,
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    },
}  # fmt: skip


def config_of(shape: str) -> PretrainedConfig:
    """Raises `KeyError` for an unknown name."""
    sizes = dict(SHAPES[shape])
    return AutoConfig.for_model(
        sizes.pop("model_type"), max_position_embeddings=131_072, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes,
    )  # fmt: skip
