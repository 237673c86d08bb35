"""Pairs for the tests of boost(): a model inside the engine, and a pristine copy of it that answers for Transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvboost import boost

VOCAB = 160
SPECIAL = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, **SPECIAL,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Splitting a matrix of 48 x 80 over cores costs more than multiplying it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=256, **SPECIAL))


def gemma2() -> PreTrainedModel:
    # 5.17 takes sdpa by default, which drops the soft cap.
    config = Gemma2Config(**DECODER, head_dim=16, sliding_window=24, attn_implementation="eager")
    return Gemma2ForCausalLM._from_config(config)


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4, **SPECIAL))


BUILDERS = {"llama": llama, "gpt2": gpt2, "gemma2": gemma2, "bloom": bloom}


def build(name: str) -> PreTrainedModel:
    """A random fp32 model whose greedy answers vary (the stock initialiser makes tiny models repeat one token)."""
    model = BUILDERS[name]().float().eval()
    generator = torch.Generator().manual_seed(3)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise * (0.02 if name == "gemma2" else 0.15))
            elif parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.6 / math.sqrt(parameter.shape[-1]))
    return model


@dataclass
class Pair:
    """`ours` is boosted, `plain` is not; both have the same weights."""

    ours: PreTrainedModel
    plain: PreTrainedModel

    @classmethod
    def make(cls, name: str, **options: Any) -> Pair:
        plain = build(name)
        return cls(boost(copy.deepcopy(plain), **{"num_blocks": 128, **options}), plain)

    def served(self) -> int:
        """Requests the engine has finished."""
        return int(self.ours.kvboost.stats().num_requests_finished)

    def same(self, *args: Any, in_engine: bool = True, **kwargs: Any) -> Any:
        """Both answers, which must be equal in value, type and shape; returns ours. Says who must have computed it."""
        before = self.served()
        torch.manual_seed(0)
        theirs = self.plain.generate(*args, **kwargs)
        torch.manual_seed(0)
        ours = self.ours.generate(*args, **kwargs)
        assert (self.served() > before) == in_engine, "served by the wrong loop"
        assert type(ours) is type(theirs)
        if isinstance(theirs, Tensor):
            assert_equal(ours, theirs)
        else:
            assert_equal(ours.sequences, theirs.sequences)
            for name in ("scores", "logits"):
                assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
        return ours


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
    assert ours.tolist() == theirs.tolist()
    assert not ours.is_inference()


def prompts(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Random prompts, padded on the left with token 0."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None, :] >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}
