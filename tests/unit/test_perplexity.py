"""Every token is counted once, with enough before it, and the figure is the model's own."""

from __future__ import annotations

import math

import pytest
import torch

import packed_checkpoints as made
from kvboost import KVBoost
from kvboost.bench.perplexity import _split, score, windows


@pytest.mark.parametrize(("length", "window"), [(2, 16), (16, 16), (17, 16), (40, 16), (41, 17), (1000, 64)])
def test_windows_count_every_token_but_the_first_once(length: int, window: int) -> None:
    seen: list[int] = []
    for start, counted in windows(length, window):
        end = min(length, start + window)
        assert counted >= 1 and (start == 0 or counted >= window // 2)
        seen += range(start + counted, end)
    assert seen == list(range(1, length))


def test_the_score_is_that_of_the_model() -> None:
    model = made.tiny()
    ids = [(7 * i * i + 3) % 96 for i in range(50)]
    with torch.no_grad():
        logprobs = [model(torch.tensor([ids[s : s + 32]])).logits[0].log_softmax(-1) for s in (0, 16, 32)]
    expected, best = 0.0, []
    for place in range(1, 50):
        start = 0 if place < 32 else 16 if place < 48 else 32
        row = logprobs[start // 16][place - 1 - start]
        expected += float(row[ids[place]])
        best.append(int(row.argmax()))
    with KVBoost.from_model(model, num_blocks=32) as llm:
        scores = score(llm, ids, 32)
    assert math.isclose(scores.log_likelihood, expected, rel_tol=1e-4)
    assert scores.best == best
    assert math.isclose(scores.perplexity, math.exp(-expected / 49), rel_tol=1e-3)


def test_weights_may_stand_behind_a_model() -> None:
    assert _split("dir/model@int4") == ("dir/model", "int4")
    assert _split("user@host/model") == ("user@host/model", None)
    assert _split("smollm2") == ("smollm2", None)
