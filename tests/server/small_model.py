"""A tiny Llama of random weights that speaks bytes, and the same engine on a model that costs nothing."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost import KVBoost
from kvboost.engine.runner import StepLogits
from kvboost.engine.scheduler import StepPlan

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]

TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE,
    )  # fmt: skip


def small_engine(**options: Any) -> KVBoost:
    """512 tokens of context, 128 blocks of 16, unless `options` say otherwise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return KVBoost.from_model(LlamaForCausalLM(config), byte_tokenizer(), **{"num_blocks": 128, **options})


def slow_down(kv: KVBoost, seconds: float) -> KVBoost:
    """Make every step take at least `seconds`, so that a test can look at a request while it runs."""
    runner = kv.engine._runner
    run = runner.run

    def slowly(*arguments: Any, **more: Any) -> StepLogits:
        time.sleep(seconds)
        return run(*arguments, **more)

    runner.run = slowly  # type: ignore[method-assign]
    return kv


class FreeRunner:
    """Stands where the runner would: every request gets the same letter, at no cost."""

    looks_ahead = False
    weights = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self._rows = torch.full((1, len(SPECIAL) + 256), -10.0).repeat(512, 1)
        self._rows[:, SPECIAL.index("<|end|>") + 40] = 10.0

    def take_memory_ahead(self, num_touched: int) -> bool:
        return False

    def run(self, plan: StepPlan, follows: StepLogits | None = None) -> StepLogits:
        sampled = [work.request for work in plan.work if work.sample]
        return StepLogits(sampled, self._rows[: len(sampled)], [])


def free_engine(**options: Any) -> KVBoost:
    """An engine whose model costs nothing, to measure everything around it."""
    with mock.patch("kvboost.api.build.Runner", FreeRunner):
        return small_engine(**options)
