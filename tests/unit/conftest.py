"""A tiny Llama with a word-level tokenizer and a chat template: everything a caller can do, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost import KVBoost

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


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model saved as a model directory with its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tiny() -> Iterator[KVBoost]:
    """A fresh engine around the tiny model: 64 blocks of 16 tokens. Its invariants are checked at the end."""
    kv = KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=64, max_num_batched_tokens=64)
    yield kv
    if not kv.engine.closed:
        kv.check()
        stats = kv.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.blocks_referenced == stats.blocks_pinned
    kv.close()
