"""Every served family answers as Transformers' own `generate` does, token for token, however its KV came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from families import BY_NAME, FAMILIES
from kvboost import KVBoost, SamplingParams
from reference import Reference, prompt, reference
from tiny import Family

NEW_TOKENS = 20
BLOCK = 16
PREFIX = 50
"""Shared tokens of the warm cases: three blocks of 16 and 2 more; past every window."""

LOGPROB_ATOL = 1e-4
SEEDED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}

pytestmark = pytest.mark.parametrize("family", FAMILIES, ids=str)


def engine(family: Family, **options: Any) -> KVBoost:
    """An engine on a fresh build; a pool of 64 blocks unless said otherwise."""
    return KVBoost.from_model(family.build(), **{"num_blocks": 64, "block_size": BLOCK, **options})


def ask(kv: KVBoost, prompts: list[list[int]], count: int = NEW_TOKENS, **kwargs: Any) -> list[Any]:
    """Greedy results of one `generate` call; the engine's invariants are checked afterwards."""
    results = kv.generate(prompts, max_new_tokens=count, temperature=0, ignore_eos=True, **kwargs)
    assert len(results) == len(prompts)
    assert_idle(kv)
    return results


def assert_idle(kv: KVBoost) -> None:
    kv.check()
    stats = kv.stats()
    assert stats.num_running == 0 and stats.num_waiting == 0


def assert_greedy(
    ref: Reference, prompts: Sequence[Sequence[int]], results: Sequence[Any], case: str, count: int = NEW_TOKENS
) -> None:
    for ids, result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == list(ids)
        ref.assert_same(ids, result.token_ids, count, case)
        assert result.finish_reason == "length" and result.exact
        assert result.usage.prompt_tokens == len(ids) and result.usage.output_tokens == count


def with_prefix(seed: int, *suffix_lengths: int, prefix: int = PREFIX) -> list[list[int]]:
    shared = prompt(seed, prefix)
    return [shared + prompt(seed + 100 + i, length) for i, length in enumerate(suffix_lengths)]


def test_path(family: Family) -> None:
    with engine(family) as kv:
        assert kv.capabilities.path == family.path, kv.capabilities.reason
        assert kv.capabilities.reason


def test_cold(family: Family) -> None:
    ids = prompt(1, 41)
    with engine(family) as kv:
        results = ask(kv, [ids])
        assert results[0].usage.cached_tokens == 0
        assert_greedy(reference(family.name), [ids], results, "cold")


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_warm(family: Family, block_size: int) -> None:
    """Unequal suffixes behind one prefix, then the first prompt again; a prompt of whole blocks keeps a token to compute."""
    prompts = with_prefix(2, 3, 19, 9)
    whole = prompt(3, 64)
    shared = PREFIX // block_size * block_size
    with engine(family, block_size=block_size) as kv:
        first = ask(kv, [*prompts[:1], whole])
        rest = ask(kv, [*prompts[1:], prompts[0], whole])
        ref = reference(family.name)
        assert_greedy(ref, [*prompts[:1], whole], first, "before warm")
        assert_greedy(ref, [*prompts[1:], prompts[0], whole], rest, f"warm, blocks of {block_size}")
        assert all(shared <= r.usage.cached_tokens <= PREFIX for r in rest[:2])
        assert rest[2].usage.cached_tokens >= shared
        assert 64 - block_size <= rest[3].usage.cached_tokens < 64


def test_twins(family: Family) -> None:
    """Prompts of one call that share a prefix, two of them identical."""
    prompts = with_prefix(4, 5, 12)
    prompts.append(list(prompts[0]))
    with engine(family) as kv:
        assert_greedy(reference(family.name), prompts, ask(kv, prompts), "twins")


def test_turns(family: Family) -> None:
    """Three turns: all full blocks of the previous prompt and answer are found, but for the last token's KV."""
    ref = reference(family.name)
    history: list[int] = []
    with engine(family) as kv:
        for turn, length in enumerate((37, 9, 14)):
            ids = history + prompt(5 + turn, length)
            (result,) = ask(kv, [ids])
            assert_greedy(ref, [ids], [result], f"turn {turn}")
            assert result.usage.cached_tokens >= max(0, len(history) - 1) // BLOCK * BLOCK
            history = ids + result.token_ids


def test_unequal_batch(family: Family) -> None:
    prompts = [prompt(8, length) for length in (70, 1, 33, 16, 7, 17)]
    with engine(family) as kv:
        assert_greedy(reference(family.name), prompts, ask(kv, prompts), "unequal batch")


def test_chunked_prefill(family: Family) -> None:
    """A budget of 24 tokens a step: prompts enter in pieces that end inside blocks, beside running sequences."""
    prompts = [prompt(8, 70), prompt(9, 1), prompt(9, 45), prompt(8, 33)]
    with engine(family, max_num_batched_tokens=24) as kv:
        assert_greedy(reference(family.name), prompts, ask(kv, prompts), "chunked prefill")


def test_preempted(family: Family) -> None:
    """Four sequences that each grow to 4 blocks, in a pool of 10."""
    prompts = [prompt(10, length) for length in (33, 37, 40, 35)]
    with engine(family, num_blocks=10) as kv:
        results = ask(kv, prompts, 28)
        assert kv.stats().num_preemptions > 0
        assert_greedy(reference(family.name), prompts, results, "preempted", 28)


def test_sampled_with_seed(family: Family) -> None:
    """Same seed, same tokens: alone, among others, and in a pool so small that it is preempted."""
    ids = prompt(10, 35)
    wanted = SamplingParams(seed=7, max_tokens=28, ignore_eos=True, **SEEDED)
    others = [
        SamplingParams(temperature=0, max_tokens=28, ignore_eos=True),
        wanted.replace(seed=8),
        wanted.replace(seed=None),
    ]
    prompts = [prompt(10, 33), prompt(10, 37), ids, prompt(10, 40)]
    mixed = [others[0], others[1], wanted, others[2]]
    with engine(family) as kv:
        alone = kv.generate(ids, sampling=wanted).token_ids
        other = kv.generate(ids, sampling=wanted.replace(seed=8)).token_ids
        batch = kv.generate(prompts, sampling=mixed)
    with engine(family, num_blocks=10) as kv:
        tight = kv.generate(prompts, sampling=mixed)
        assert kv.stats().num_preemptions > 0
        assert_idle(kv)
    assert len(alone) == 28
    assert alone != other and alone != reference(family.name).tokens(ids, 28)
    assert batch[2].token_ids == alone
    assert tight[2].token_ids == alone
    reference(family.name).assert_same(prompts[0], batch[0].token_ids, 28, "greedy among sampled")
    reference(family.name).assert_same(prompts[0], tight[0].token_ids, 28, "greedy among sampled, preempted")


def test_cancelled_mid_stream(family: Family) -> None:
    """A stream closed after three pieces leaves nothing behind; what it computed may be reused and must be right."""
    ids, neighbour = prompt(1, 41), prompt(12, 20)
    ref = reference(family.name)
    with engine(family) as kv:
        stream = kv.stream(ids, max_new_tokens=60, temperature=0, ignore_eos=True)
        seen: list[int] = []
        for _ in range(3):
            seen += next(stream).token_ids
        stream.close()
        assert seen == ref.tokens(ids, NEW_TOKENS)[: len(seen)]
        prompts = [neighbour, ids]
        assert_greedy(ref, prompts, ask(kv, prompts), "after a cancelled stream")
        stats = kv.stats()
        assert stats.kv_slots_allocated == 0, "blocks are still held by the cancelled request"
        assert kv.reset_cache()
        assert_greedy(ref, prompts, ask(kv, prompts), "after reset_cache")


def test_logprobs(family: Family) -> None:
    """Prompt and output log-probabilities against one cacheless forward of the reference, cold and warm."""
    ids = prompt(13, 45)
    ref = reference(family.name)
    with engine(family) as kv:
        (cold,) = ask(kv, [ids], logprobs=4, prompt_logprobs=4)
        (warm,) = ask(kv, [ids], logprobs=4)
    assert_greedy(ref, [ids, ids], [cold, warm], "logprobs")
    want = ref.logprobs(ids + cold.token_ids)
    assert cold.prompt_logprobs[0] is None
    assert_logprobs(want[: len(ids) - 1], ids[1:], cold.prompt_logprobs[1:], "prompt")
    for name, result in (("cold", cold), ("warm", warm)):
        assert_logprobs(want[len(ids) - 1 : -1], result.token_ids, result.logprobs, name)


def assert_logprobs(want: torch.Tensor, chosen: list[int], got: list[dict[int, Any]], case: str) -> None:
    """want: [positions, vocab]. Each position holds the chosen token and the four likeliest, with their ranks."""
    assert len(got) == len(chosen) == len(want)
    worst = 0.0
    for row, token, entry in zip(want, chosen, got, strict=True):
        assert token in entry and 4 <= len(entry) <= 5
        for other, logprob in entry.items():
            worst = max(worst, abs(logprob.logprob - row[other].item()))
            stronger = int((row > row[other] + LOGPROB_ATOL).sum())
            weaker = int((row < row[other] - LOGPROB_ATOL).sum())
            assert stronger < logprob.rank <= len(row) - weaker, f"{case}: token {other} has rank {logprob.rank}"
    assert worst <= LOGPROB_ATOL, f"{case}: log-probabilities differ by {worst:.2e}"


def test_compat_path_of_a_paged_model(family: Family) -> None:
    """The compatibility path serves the same models: warm, in an unequal batch, in chunks, preempted."""
    if BY_NAME[family.name].path == "compat":
        pytest.skip("all its other cases run on the compatibility path")
    prompts = [*with_prefix(2, 3, 19), prompt(8, 7)]
    tight = [prompt(10, length) for length in (33, 37, 40, 35)]
    ref = reference(family.name)
    with engine(family, path="compat", max_num_batched_tokens=40) as kv:
        assert kv.capabilities.path == "compat"
        assert_greedy(ref, prompts[:1], ask(kv, prompts[:1]), "compat, cold")
        results = ask(kv, prompts)
        assert_greedy(ref, prompts, results, "compat, warm")
        assert PREFIX // BLOCK * BLOCK <= results[1].usage.cached_tokens <= PREFIX
    with engine(family, path="compat", num_blocks=10) as kv:
        assert_greedy(ref, tight, ask(kv, tight, 28), "compat, preempted", 28)
        assert kv.stats().num_preemptions > 0
