"""boost(): the settings of Transformers' generate(), each against a pristine copy of the same tiny model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from boost_models import BUILDERS, VOCAB, Pair, assert_equal, one_thread, prompts  # noqa: F401
from kvboost import KVBoost

SAME_TOKENS = {"use_cache", "cache_implementation", "max_time", "remove_invalid_values"}
"""Settings that do not change what a healthy model says."""


@pytest.fixture(scope="module", params=BUILDERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair.make(request.param)
    yield made
    made.ours.kvboost.check()
    made.ours.kvboost.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    made = Pair.make("llama")
    yield made
    made.ours.kvboost.check()
    made.ours.kvboost.close()


def ends(pair: Pair, inputs: dict[str, Tensor], at: list[int]) -> list[int]:
    """The tokens that `pair.plain` says at these output places, one row after another."""
    out = pair.plain.generate(**inputs, max_new_tokens=24, do_sample=False)
    return [int(out[row % len(out), inputs["input_ids"].shape[1] + place]) for row, place in enumerate(at)]


# -- what it is -----------------------------------------------------------------------------------------------------


def test_a_boosted_model_is_still_the_model(llama: Pair) -> None:
    assert isinstance(llama.ours, PreTrainedModel)
    assert type(llama.ours) is type(llama.plain)
    assert isinstance(llama.ours.kvboost, KVBoost)
    assert inspect.signature(llama.ours.generate) == inspect.signature(llama.plain.generate)


def test_paths(pair: Pair) -> None:
    assert pair.ours.kvboost.capabilities.path == ("compat" if "Bloom" in type(pair.ours).__name__ else "paged")


# -- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[17], [33, 5, 20], [1, 16], [40, 40]])
def test_greedy_batches(pair: Pair, lengths: list[int]) -> None:
    inputs = prompts(lengths)
    out = pair.same(**inputs, max_new_tokens=20, do_sample=False)
    assert out.shape == (len(lengths), max(lengths) + 20)


def test_inputs_in_every_shape(pair: Pair) -> None:
    inputs = prompts([20, 9])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    pair.same(ids, attention_mask=mask.bool(), max_new_tokens=5)
    pair.same(ids[1:], max_new_tokens=5)  # the mask comes from the padding tokens
    pair.same(inputs=ids.int(), attention_mask=mask, max_new_tokens=5)
    pair.same(max_new_tokens=5)  # starts from bos
    assert pair.same(max_new_tokens=5, forced_bos_token_id=12)[0, 1] == 12
    pair.same(ids, attention_mask=mask)  # default length


def test_rows_end_at_their_eos_and_are_padded(pair: Pair) -> None:
    inputs = prompts([30, 11, 4])
    eos = ends(pair, inputs, [3, 9])
    out = pair.same(**inputs, max_new_tokens=24, eos_token_id=eos, pad_token_id=7)
    assert (out[0] == 7).any(), "no row has ended early"
    pair.same(**inputs, max_new_tokens=24, eos_token_id=eos[0])
    pair.same(**inputs, max_new_tokens=24, eos_token_id=eos, min_new_tokens=12)
    pair.same(**inputs, max_new_tokens=24, eos_token_id=eos, min_length=35)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [*([i] for i in range(3, 60)), *([i, j] for i in range(60, 70) for j in range(3, 150))]},
        {"suppress_tokens": list(range(3, 100))},
        {"begin_suppress_tokens": list(range(3, 150))},
        {"forced_eos_token_id": 13, "eos_token_id": 13},
        {"sequence_bias": [[[17], 4.0], [[5, 6], -3.0]]},
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 8},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 1},
        {"remove_invalid_values": True, "renormalize_logits": True},
        {"watermarking_config": WatermarkingConfig(bias=3.0, context_width=1)},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "suppress_tokens": [4, 5, 6]},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"max_time": 60.0},
    ],
    ids=" ".join,
)
def test_settings(pair: Pair, settings: dict[str, Any]) -> None:
    changed = []
    for lengths in ([24, 7], [90, 31]):
        inputs = prompts(lengths, seed=5)
        out = pair.same(**inputs, max_new_tokens=12, **settings)
        changed.append(out.tolist() != pair.plain.generate(**inputs, max_new_tokens=12).tolist())
    assert any(changed) or SAME_TOKENS & set(settings), "the setting changes nothing here: the test shows nothing"


def test_generation_config_and_the_models_own(llama: Pair) -> None:
    inputs = prompts([12, 30])
    config = GenerationConfig(max_new_tokens=9, suppress_tokens=[4, 90, 91], pad_token_id=3)
    llama.same(**inputs, generation_config=config)
    llama.same(**inputs, generation_config=config, max_new_tokens=5)
    llama.same(**inputs, max_length=37)
    for model in (llama.ours, llama.plain):
        model.generation_config.repetition_penalty = 1.9
    try:
        llama.same(**inputs, max_new_tokens=9)
    finally:
        for model in (llama.ours, llama.plain):
            model.generation_config.repetition_penalty = None


# -- sampling -------------------------------------------------------------------------------------------------------


def test_sampling_repeats_with_the_seed(pair: Pair) -> None:
    inputs = prompts([19, 6])
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(pair.ours.generate(**inputs, do_sample=True, max_new_tokens=12, temperature=1.5).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_return_sequences(pair: Pair) -> None:
    inputs = prompts([19, 6])
    torch.manual_seed(0)
    out = pair.ours.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=12, temperature=2.0)
    assert out.shape == (6, 31)
    assert out[:, :19].tolist() == inputs["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in out.tolist()}) == 6
    with pytest.raises(ValueError, match="num_return_sequences"):
        pair.ours.generate(**inputs, num_return_sequences=3, do_sample=False)


def test_one_choice_left_is_greedy(llama: Pair) -> None:
    inputs = prompts([19, 6])
    greedy = llama.plain.generate(**inputs, max_new_tokens=12)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert_equal(llama.ours.generate(**inputs, do_sample=True, max_new_tokens=12, **settings), greedy)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 0, "typical_p": 0.5},
        {"top_k": 0, "epsilon_cutoff": 0.01},
        {"top_k": 0, "eta_cutoff": 0.02},
        {"top_k": 20, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
    ],
    ids=" ".join,
)
def test_draws_follow_transformers_distribution(llama: Pair, settings: dict[str, Any]) -> None:
    """First tokens of 1,500 draws against the probabilities Transformers computes for them."""
    inputs, draws = prompts([14], seed=8), 1500
    asked = {"do_sample": True, "max_new_tokens": 1, **settings}
    scores = llama.plain.generate(**inputs, **asked, output_scores=True, return_dict_in_generate=True).scores[0]
    expected = scores[0].softmax(-1)
    torch.manual_seed(0)
    out = llama.ours.generate(**inputs, **asked, num_return_sequences=draws)
    found = torch.bincount(out[:, -1], minlength=VOCAB) / draws
    assert not found[expected == 0].any(), "a token that was filtered out"
    # Mean total variation of n draws is at most sqrt(kept / n) / 2; doubled, it fails by chance less than once in 1e6.
    kept = int((expected > 0).sum())
    assert 0.5 * (found - expected).abs().sum() < (kept / draws) ** 0.5


# -- scores, streamers, criteria, processors -------------------------------------------------------------------------


def test_scores_and_logits(pair: Pair) -> None:
    inputs = prompts([24, 7])
    eos = ends(pair, inputs, [0, 6])[1]
    asked = {"max_new_tokens": 14, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    for settings in ({}, {"repetition_penalty": 1.6, "suppress_tokens": [3, 4]}, {"eos_token_id": eos}):
        ours = pair.same(**inputs, **asked, **settings)
        theirs = pair.plain.generate(**inputs, **asked, **settings)
        new = ours.sequences[:, 24:]
        for name in ("scores", "logits"):
            assert len(getattr(ours, name)) == len(getattr(theirs, name)) == new.shape[1]
            for step, (a, b) in enumerate(zip(getattr(ours, name), getattr(theirs, name), strict=True)):
                running = (new[:, :step] != eos).all(dim=1) if "eos_token_id" in settings else torch.ones(2).bool()
                torch.testing.assert_close(a[running], b[running], rtol=1e-3, atol=1e-3)
        transitions = pair.ours.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
        assert transitions.shape == new.shape and torch.isfinite(transitions).all()
    plain = pair.same(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    assert plain.scores is None


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer(pair: Pair) -> None:
    inputs = prompts([13])
    ours, theirs = Recorder(), Recorder()
    out = pair.ours.generate(**inputs, max_new_tokens=8, streamer=ours)
    assert_equal(out, pair.plain.generate(**inputs, max_new_tokens=8, streamer=theirs))
    assert ours.puts == theirs.puts and ours.ended == theirs.ended == 1
    ours, theirs = Recorder(), Recorder()
    pair.ours.generate(**prompts([13, 4]), max_new_tokens=8, streamer=ours)
    pair.plain.generate(**prompts([13, 4]), max_new_tokens=8, streamer=theirs)
    assert ours.puts == theirs.puts and ours.ended == 1


class StopAt(StoppingCriteria):
    """Met after a token, or by a row of `total` tokens."""

    def __init__(self, token: int = -1, total: int = 10**6) -> None:
        self.token, self.total = token, total
        self.widths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.widths.append(input_ids.shape[1])
        return (input_ids[:, -1] == self.token) | (input_ids.shape[1] >= self.total)


def test_stopping_criteria(pair: Pair) -> None:
    inputs = prompts([21, 8])
    first, second = ends(pair, inputs, [5, 11])
    out = pair.same(**inputs, max_new_tokens=24, stopping_criteria=[StopAt(first)], eos_token_id=second)
    assert out.tolist() != pair.plain.generate(**inputs, max_new_tokens=24).tolist()
    assert (
        pair.same(**inputs, max_new_tokens=24, stopping_criteria=StoppingCriteriaList([StopAt(total=30)])).shape[1]
        == 30
    )
    # No EOS: Transformers does not pad, rows run on until the last one is done.
    pair.same(**inputs, max_new_tokens=24, stopping_criteria=[StopAt(first), StopAt(second)])
    seen = StopAt()
    pair.ours.generate(**inputs, max_new_tokens=3, stopping_criteria=[seen])
    assert set(seen.widths) <= {22, 23, 24}


class SeventhScore(StoppingCriteria):
    """Met when seven rows of scores are there and the last one explains the last token."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (scores[-1].argmax(-1) == input_ids[:, -1]) & (len(scores) >= 7)


def test_criteria_get_scores(llama: Pair) -> None:
    asked = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_scores": True}
    out = llama.same(**prompts([21, 8]), **asked, stopping_criteria=[SeventhScore()])
    assert out.sequences.shape == (2, 28)


class Shift(LogitsProcessor):
    """Favours the token after the last one; counts on seeing the whole row, padding included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        rows = torch.arange(len(input_ids))
        scores[rows, (input_ids[:, -1] + input_ids.shape[1]) % VOCAB] += 2.5
        return scores


def test_custom_processors(pair: Pair) -> None:
    inputs = prompts([21, 8])
    out = pair.same(**inputs, max_new_tokens=16, logits_processor=LogitsProcessorList([Shift()]))
    assert out.tolist() != pair.plain.generate(**inputs, max_new_tokens=16).tolist()
    pair.same(**inputs, max_new_tokens=16, logits_processor=[Shift()], repetition_penalty=1.2)


def test_prefix_allowed_tokens(pair: Pair) -> None:
    inputs = prompts([21, 8])

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        return list(range(10 + 40 * batch_id, 40 + 40 * batch_id, 1 + ids.shape[0] % 2))

    pair.same(**inputs, max_new_tokens=12, prefix_allowed_tokens_fn=allowed)
    out = pair.ours.generate(
        **inputs, max_new_tokens=6, prefix_allowed_tokens_fn=allowed, do_sample=True, num_return_sequences=2, top_k=0
    )
    assert ((out[:2, 21:] >= 10) & (out[:2, 21:] < 40)).all() and ((out[2:, 21:] >= 50) & (out[2:, 21:] < 80)).all()


class BrokenProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        raise ZeroDivisionError("mine")


class BrokenCriterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    "broken",
    [{"logits_processor": [BrokenProcessor()]}, {"stopping_criteria": [BrokenCriterion()]}],
    ids=["logits_processor", "stopping_criteria"],
)
def test_what_they_raise_reaches_the_caller_alone(llama: Pair, broken: dict[str, Any]) -> None:
    inputs = prompts([40])
    answers: list[Tensor] = []
    other = threading.Thread(target=lambda: answers.append(llama.ours.generate(**inputs, max_new_tokens=60)))
    other.start()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError, match="mine"):
            llama.ours.generate(**prompts([9]), max_new_tokens=8, **broken)
    other.join()
    assert_equal(answers[0], llama.plain.generate(**inputs, max_new_tokens=60))


def test_a_streamer_that_raises_ends_the_request(llama: Pair) -> None:
    class Bad(Recorder):
        def put(self, value: Tensor) -> None:
            if len(self.puts) == 2:
                raise ZeroDivisionError
            super().put(value)

    with pytest.raises(ZeroDivisionError):
        llama.ours.generate(**prompts([9]), max_new_tokens=200, streamer=Bad())
    llama.same(**prompts([9]), max_new_tokens=5)
    assert llama.ours.kvboost.stats().num_running == 0
