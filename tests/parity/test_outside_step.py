"""A boosted model stays a model: the user's own forward, generate and training are what they were before boosting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from families import BY_NAME
from kvboost import KVBoost
from reference import prompt, reference
from tiny import Family

CASES = (
    "llama",
    "mistral-window",
    "gemma2",
    "gemma3-text",
    "gpt2",
    "opt",
    "deepseek-v3",
    "gpt-oss",
    "falcon-new",
    "falcon-alibi",
    "bloom",
    "llama-rope-dynamic-short",
    "phi3-longrope-short",
)
"""sdpa, windows, a soft cap on eager, positions of every kind, unequal K and V, sinks on eager, the compatibility path,
rope that is rewritten inside a forward."""

pytestmark = pytest.mark.parametrize("family", [BY_NAME[name] for name in CASES], ids=str)


def left_padded() -> dict[str, torch.Tensor]:
    """Prompts of 40, 9 and 27 tokens in one rectangle: longer than every window."""
    prompts = [prompt(1, 40), prompt(2, 9), prompt(3, 27)]
    ids = torch.zeros(3, 40, dtype=torch.long)
    mask = torch.zeros(3, 40, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids[row, 40 - len(tokens) :] = torch.tensor(tokens)
        mask[row, 40 - len(tokens) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def forward(model: PreTrainedModel) -> torch.Tensor:
    """Logits at the real tokens; rows of padding hold nothing that must be kept."""
    batch = left_padded()
    logits: torch.Tensor = model(**batch).logits
    return logits[batch["attention_mask"].bool()]


@torch.no_grad()
def cached_decode(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a second forward over the cache that a first one returned, under the argument name of this release."""
    ids = torch.tensor([prompt(4, 30)])
    first = model(ids[:, :26], use_cache=True)
    name = "cache" if getattr(first, "cache", None) is not None else "past_key_values"
    logits: torch.Tensor = model(ids[:, 26:], **{name: getattr(first, name)}).logits
    return logits


def generated(model: PreTrainedModel) -> list[list[int]]:
    out = model.generate(**left_padded(), max_new_tokens=12, do_sample=False)
    return out.tolist()


def training(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Loss and every gradient of one training step without an update; the model is put back as it was."""
    ids = torch.tensor([prompt(5, 32), prompt(6, 32)])
    torch.manual_seed(0)  # GPT-2 and OPT have dropout
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert got and any(g.abs().max() > 0 for g in got.values())
    model.zero_grad(set_to_none=True)
    model.eval()
    return {**got, "loss": loss.detach()}


def everything(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "forward": forward(model),
        "cached decode": cached_decode(model),
        "generate": generated(model),
        "training": training(model),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any], when: str) -> None:
    for part, want in before.items():
        if part == "generate":
            assert after[part] == want, f"{when}: generate differs"
        else:
            torch.testing.assert_close(
                after[part], want, rtol=1e-5, atol=1e-5, msg=lambda text, part=part: f"{when}, {part}: {text}"
            )


def test_unchanged_around_requests(family: Family) -> None:
    """Before boosting, after it, after requests were served, and after the engine was closed."""
    model = family.build()
    before = everything(model)
    kv = KVBoost.from_model(model, num_blocks=64)
    assert_unchanged(before, everything(model), "after from_model")
    ids = prompt(7, 37)
    reference(family.name).assert_same(ids, _ask(kv, ids), 16, "after the user's training step")
    assert_unchanged(before, everything(model), "after a request")
    reference(family.name).assert_same(ids, _ask(kv, ids), 16, "between the user's calls")
    kv.close()
    assert_unchanged(before, everything(model), "after close")


def test_unchanged_beside_a_generating_thread(family: Family) -> None:
    """The user's forwards and the engine's steps in two threads at once: neither sees the other."""
    model = family.build()
    before = forward(model)
    before_tokens = generated(model)
    prompts = [prompt(8, length) for length in (33, 7, 46)]
    answers: list[list[int]] = []
    stop = threading.Event()
    with KVBoost.from_model(model, num_blocks=64) as kv:

        def serve() -> None:
            while not stop.is_set() or not answers:
                results = kv.generate(prompts, max_new_tokens=16, temperature=0, ignore_eos=True)
                answers.extend(r.token_ids for r in results)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            try:
                for _ in range(10):
                    torch.testing.assert_close(forward(model), before, rtol=1e-5, atol=1e-5)
                    assert generated(model) == before_tokens
            finally:
                stop.set()
            served.result(timeout=60)
        kv.check()
    for i, tokens in enumerate(answers):
        reference(family.name).assert_same(prompts[i % 3], tokens, 16, "beside the user's own calls")


def _ask(kv: KVBoost, ids: list[int]) -> list[int]:
    return kv.generate(ids, max_new_tokens=16, temperature=0, ignore_eos=True).token_ids
