"""A tiny Llama of random weights and a tokenizer whose tokens are bytes, with a chat template."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE,
    )  # fmt: skip


def tiny_llama(vocab_size: int = 263, **changes: Any) -> LlamaForCausalLM:
    """Two layers of random weights, spread widely enough that greedy answers vary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
