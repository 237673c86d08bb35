"""Every wrong value is refused with the field's name."""

from __future__ import annotations

import math

import pytest

from kvboost.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from kvboost.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.0), ("n", True), ("n", 10**6),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"), ("temperature", None),
        ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("seed", 2**64), ("seed", "7"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0), ("min_tokens", -1),
        ("stop", ""), ("stop", ("a", "")), ("stop", (3,)), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101.0}), ("logit_bias", {"x": 1.0}),
        ("allowed_token_ids", ()), ("allowed_token_ids", (1, -1)), ("bad_words", ("",)), ("bad_words", (" ",)),
        ("logprobs", -1), ("logprobs", MAX_LOGPROBS + 1), ("prompt_logprobs", 1.5),
    ],
)  # fmt: skip
def test_wrong_value_names_its_field(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_min_tokens_above_max_tokens():
    with pytest.raises(InvalidRequest, match="5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_values_are_normalised():
    params = SamplingParams(
        stop="x", stop_token_ids=[1, 2], bad_words=["b"], allowed_token_ids=[3], logit_bias={"7": 1, 8: -2}
    )
    assert (params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids) == (
        ("x",),
        (1, 2),
        ("b",),
        (3,),
    )
    assert params.logit_bias == {7: 1.0, 8: -2.0}
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()


def test_replace_validates_again():
    params = SamplingParams(temperature=0.0, seed=-1)
    assert params.greedy
    assert not params.replace(temperature=0.5).greedy
    with pytest.raises(InvalidRequest):
        params.replace(top_p=2.0)
