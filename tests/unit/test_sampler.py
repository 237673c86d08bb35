"""The sampler against Transformers' own processors and warpers, and its promises about seeds."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import generation as hf

from kvboost.engine import sampler
from kvboost.engine.sampler import SampleError, SampleRow, bad_word_sequences, sample, token_logprobs
from kvboost.engine.sampling_ops import change_logits_, uniform
from kvboost.engine.sampling_params import SamplingParams
from kvboost.errors import EngineStepError


def row(*, prompt=(), output=(), seed=0, stop_ids=(), bad=(), processors=(), **params) -> SampleRow:
    return SampleRow(
        SamplingParams(**{"max_tokens": None} | params), list(prompt), list(output), seed, frozenset(stop_ids), tuple(bad), processors
    )  # fmt: skip


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def language_like(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Logits of a Zipf distribution in random order: most mass on few tokens, as a language model's."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -1.8 * torch.log(torch.arange(vocab) + 2.0)
    return torch.stack([zipf[torch.randperm(vocab, generator=generator)] for _ in range(rows)])


def transformers_probs(scores: Tensor, p: SamplingParams) -> Tensor:
    warpers = [hf.TemperatureLogitsWarper(float(p.temperature))]
    if p.top_k > 0:
        warpers.append(hf.TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(p.top_p))
    if p.min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(p.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


def drawn_counts(logits: Tensor, params: SamplingParams, draws: int) -> Tensor:
    """How often each token comes out for `draws` equally spaced values of the uniform number."""
    rows = [SampleRow(params, [], [], 0, frozenset(), ()) for _ in range(draws)]
    with mock.patch.object(sampler, "uniforms", lambda rows: [(i + 0.5) / len(rows) for i in range(len(rows))]):
        tokens = sample(logits.expand(draws, -1), rows).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 20, 63, 64, 65, 10_000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.31, 0.01]),
        "min_p": st.sampled_from([0.0, 0.011, 0.1, 0.503]),
    }
)


@settings(max_examples=60, deadline=None)
@given(filters, st.integers(0, 2**31), st.sampled_from([7, 50, 256, 300, 700]))
def test_distribution_is_that_of_transformers_warpers(settings_, seed, vocab):
    params, draws = SamplingParams(**settings_), 500
    logits = random_logits(1, vocab, seed)
    want = transformers_probs(logits, params)[0]
    got = drawn_counts(logits, params, draws)
    # A token owns one interval of [0, 1): it holds draws * p points of the grid, up to one.
    assert (got - draws * want).abs().max() <= 1.01
    assert got[want == 0].sum() == 0


def test_top_k_keeps_ties_with_the_last_one_as_transformers():
    logits = torch.tensor([[5.0] + [4.0] * 300 + [1.0] * 400])
    params = SamplingParams(top_k=3)
    assert (drawn_counts(logits, params, 1500) > 0).equal(transformers_probs(logits, params)[0] > 0)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 1e-4}, {"top_k": 200, "top_p": 0.99}, {"top_k": 2000}])
@pytest.mark.parametrize("make", [language_like, random_logits])
def test_best_tokens_first_equals_full_sort(params, make):
    logits = make(24, 20_000)
    rows = [row(seed=i, **params) for i in range(24)]
    quick = sample(logits, rows).token_ids
    with mock.patch.object(sampler, "_rung", lambda width, vocab: vocab):
        assert sample(logits, rows).token_ids == quick


def test_wide_kept_set_reaches_past_the_first_tokens():
    """A flat distribution: the 256 best hold 3% of the mass."""
    logits = random_logits(1, 20_000, scale=0.5)
    got = drawn_counts(logits, SamplingParams(top_p=0.5), 400)
    kept = transformers_probs(logits, SamplingParams(top_p=0.5))[0] > 0
    assert got[~kept].sum() == 0
    assert (got > 0).sum() > 380


def test_frequencies_follow_the_probabilities_over_seeds():
    logits = random_logits(1, 12, scale=1.0)
    counts = Counter(sample(logits.expand(20_000, -1), [row(seed=s) for s in range(20_000)]).token_ids)
    expected = logits.softmax(-1)[0] * 20_000
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected.tolist()))
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001; the seeds are fixed, so this cannot flake


def test_uniform_numbers_are_spread_over_seeds_and_positions():
    for numbers in ([uniform(7, i) for i in range(10_000)], [uniform(i, 3) for i in range(10_000)]):
        bins = Counter(int(u * 20) for u in numbers)
        assert min(numbers) >= 0.0 and max(numbers) < 1.0
        assert sum((bins[b] - 500) ** 2 / 500 for b in range(20)) < 43.8  # 19 degrees of freedom, p = 0.001
    assert uniform(-1, 0) == uniform(2**64 - 1, 0) != uniform(0, 0)


def mixed_rows() -> list[SampleRow]:
    kinds = [
        {}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.3}, {"top_p": 0.99, "frequency_penalty": 0.5, "logprobs": 2},
        {"logit_bias": {3: 4.0}}, {"allowed_token_ids": [5, 6, 7]}, {"top_k": 1},
    ]  # fmt: skip
    return [
        row(prompt=range(20), output=range(30, 30 + i), seed=1000 + i, **kind) for i, kind in enumerate(kinds * 4)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_token_alone_and_in_any_batch(dtype):
    """bf16 logits have many ties, whose order must not depend on the neighbours either."""
    rows = mixed_rows()
    logits = random_logits(len(rows), 5003, scale=1.0).to(dtype)
    before = logits.clone()
    together = sample(logits, rows)
    assert logits.equal(before)
    for i in range(len(rows)):
        assert sample(logits[i : i + 1], rows[i : i + 1]).token_ids == [together.token_ids[i]]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled.token_ids == [together.token_ids[i] for i in order]


def test_seed_and_position_select_the_token():
    logits = torch.zeros(1, 5000)
    first = sample(logits, [row(seed=1)]).token_ids
    assert sample(logits, [row(seed=1)]).token_ids == first
    assert sample(logits, [row(seed=2)]).token_ids != first
    assert sample(logits, [row(seed=1, output=[9])]).token_ids != first


@pytest.mark.parametrize("vocab", [3, 255, 256, 257, 4099])
def test_greedy_is_argmax(vocab):
    logits = random_logits(9, vocab, seed=vocab)
    logits[0, vocab - 1] = 50.0
    logits[1, :] = 2.0  # the first among equals
    assert sample(logits, [row(temperature=0.0)] * 9).token_ids == logits.argmax(-1).tolist()


def test_greedy_does_not_copy_the_logits():
    logits = random_logits(4, 1000)
    with (
        mock.patch.object(Tensor, "to", side_effect=AssertionError),
        mock.patch.object(Tensor, "float", side_effect=AssertionError),
    ):
        sample(logits, [row(temperature=0.0)] * 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 39), max_size=30), st.lists(st.integers(0, 39), max_size=30)),
        min_size=1,
        max_size=5,
    ),
    st.floats(0.5, 2.0),
    st.integers(0, 999),
)
def test_repetition_penalty_equals_transformers(contexts, penalty, seed):
    logits = random_logits(len(contexts), 32, seed)
    rows = [
        row(prompt=p, output=o, repetition_penalty=penalty if i % 2 == 0 else 1.0) for i, (p, o) in enumerate(contexts)
    ]
    got = logits.clone()
    change_logits_(got, rows)
    for i, (prompt, output) in enumerate(contexts):
        want = logits[i : i + 1]
        if i % 2 == 0 and prompt + output:
            want = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), want.clone())
        torch.testing.assert_close(got[i : i + 1], want)


def test_presence_and_frequency_count_the_output_only():
    logits = random_logits(2, 10)
    got = logits.clone()
    change_logits_(
        got,
        [
            row(prompt=[1, 2], output=[2, 2, 5], presence_penalty=0.5, frequency_penalty=-0.25),
            row(prompt=[1], output=[3], logit_bias={0: 0.0}),
        ],
    )
    want = logits.clone()
    want[0, 2] -= 0.5 - 2 * 0.25
    want[0, 5] -= 0.5 - 0.25
    torch.testing.assert_close(got, want)


def test_bias_allowed_and_min_tokens():
    logits = torch.zeros(3, 6)
    change_logits_(
        logits,
        [
            row(logit_bias={1: 2.5, 4: -100.0, 6: 50.0}),  # 6 is outside: it must not reach the next row
            row(allowed_token_ids=[2, 3, 3, 77], logit_bias={2: 1.0, 5: 9.0}),
            row(min_tokens=2, output=[0], stop_ids=[5, 1, 1000]),
        ],
    )
    inf = float("inf")
    assert logits.tolist() == [[0, 2.5, 0, 0, -100, 0], [-inf, -inf, 1, 0, -inf, -inf], [0, -inf, 0, 0, 0, -inf]]
    reached = torch.zeros(1, 6)
    change_logits_(reached, [row(min_tokens=2, output=[0, 0], stop_ids=[5, 1])])
    assert reached.tolist() == [[0.0] * 6]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(0, 8),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5, unique_by=tuple),
)
def test_bad_words_equal_transformers(context, split, words):
    logits = random_logits(1, 6)
    got = logits.clone()
    change_logits_(got, [row(prompt=context[:split], output=context[split:], bad=map(tuple, words))])
    want = hf.NoBadWordsLogitsProcessor(words)(torch.tensor([context]), logits.clone())
    assert got.equal(want)


def test_bad_word_sequences_with_and_without_space():
    vocab = {"bad": [7], " bad": [8, 9], "x": [1], " x": [1], "": []}
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: vocab[text])
    assert bad_word_sequences([" bad", "x"], tokenizer) == ((7,), (8, 9), (1,))


def test_custom_processor_sees_the_whole_row_after_penalties():
    seen = []

    def last_only(input_ids, scores):
        seen.append((input_ids.tolist(), scores.clone()))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([4]), 0.0)

    logits = random_logits(2, 9)
    rows = [row(seed=1), row(prompt=[1], output=[2, 3], processors=(last_only,), logit_bias={0: 1.0})]
    assert sample(logits, rows).token_ids[1] == 4
    assert seen[0][0] == [[1, 2, 3]]
    assert seen[0][1][0, 0] == logits[1, 0] + 1.0


def test_impossible_rows_are_named_and_the_others_unharmed():
    logits = random_logits(4, 9)
    rows = [row(), row(temperature=0.0), row(allowed_token_ids=[2], bad=[(2,)]), row(temperature=0.0)]
    with pytest.raises(EngineStepError, match="every token is forbidden") as caught:
        sample(logits, rows)
    assert caught.value.rows == (2,)
    with pytest.raises(SampleError, match="processor boom failed: KeyError") as caught:

        def boom(ids, scores):
            raise KeyError("k")

        sample(logits, [rows[0], rows[1], row(processors=(boom,)), rows[3]])
    assert caught.value.rows == (2,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [3, 600])
def test_broken_logits_are_named(value, temperature, at):
    logits = random_logits(3, 700)
    logits[1, at] = value
    with pytest.raises(SampleError, match=f"logits are {value}") as caught:
        sample(logits, [row(temperature=temperature)] * 3)
    assert caught.value.rows == (1,)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 1e-45}, {"temperature": 1e45}]
)
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_forbidden_tokens_are_never_drawn_at_the_edges(params, u):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [300, 301, 999 - 300]] = torch.tensor([0.1, 0.2, 0.3])
    with mock.patch.object(sampler, "uniforms", lambda rows: [u]):
        assert sample(logits, [row(**params)]).token_ids[0] in (300, 301, 699)


def test_sampled_logprobs_are_raw_and_only_where_asked():
    logits = random_logits(3, 50)
    rows = [
        row(temperature=0.0, logprobs=3),
        row(seed=4),
        row(seed=5, temperature=2.0, logit_bias={7: 100.0}, logprobs=0),
    ]
    got = sample(logits, rows)
    assert got.logprobs[1] is None
    raw = logits.log_softmax(-1)
    assert list(got.logprobs[0]) == raw[0].topk(3).indices.tolist()
    assert [entry.rank for entry in got.logprobs[0].values()] == [1, 2, 3]
    assert list(got.logprobs[2]) == [7]
    assert got.logprobs[2][7].logprob == pytest.approx(raw[2, 7].item(), abs=1e-5)
    assert got.logprobs[2][7].rank == 1 + (raw[2] > raw[2, 7]).sum().item()


def test_token_logprobs_of_many_rows(monkeypatch):
    monkeypatch.setattr(sampler, "_LOGPROB_ELEMENTS", 100)  # several pieces
    logits = random_logits(11, 30).bfloat16()
    chosen = list(range(11))
    raw = logits.float().log_softmax(-1)
    for i, entry in enumerate(token_logprobs(logits, chosen, 4)):
        assert next(iter(entry)) == i
        assert set(entry) == {i, *logits[i].float().topk(4).indices.tolist()}
        for token, found in entry.items():
            assert found.logprob == pytest.approx(raw[i, token].item(), abs=1e-5)
            assert found.rank == 1 + (raw[i] > raw[i, token]).sum().item()


def test_empty_batch_and_wrong_number_of_rows():
    assert sample(torch.zeros(0, 5), []).token_ids == []
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(torch.zeros(2, 5), [row()])
