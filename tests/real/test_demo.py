"""The demo on the real model, cut to a few short answers: it compares itself with Transformers, and must agree."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from rich.console import Console

from kvboost.bench import demo, texts
from kvboost.errors import ModelLoadError
from kvboost.models.smollm2 import find_smollm2

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_smollm2()
    except ModelLoadError as error:
        pytest.skip(str(error))
    for name in ("ANSWER_TOKENS", "CHAT_TOKENS"):
        monkeypatch.setattr(demo, name, 6)
    for name in ("CODING_QUESTIONS", "CHAT_TURNS", "RAG_REQUESTS"):
        monkeypatch.setattr(texts, name, getattr(texts, name)[:3])


def test_demo_agrees_with_transformers_and_reuses(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[demo.Part] = []
    show = demo._show
    monkeypatch.setattr(demo, "_show", lambda part, console: shown.append(part) or show(part, console))
    output = io.StringIO()
    assert demo.run_demo(Console(file=output, width=100))

    coding, chat, documents = (part.requests for part in shown)
    for request in [*coding, *chat, *documents]:
        expected = request.answers["transformers"].token_ids
        assert expected
        assert all(answer.token_ids == expected for answer in request.answers.values())
    assert [r.answers["kvboost"].cached_tokens // 16 for r in coding[1:]] == [982 // 16] * 2
    # Each turn finds what the last one held, but for the block that was not full and the re-tokenised seam.
    for before, now in pairwise(chat):
        assert now.answers["kvboost"].cached_tokens >= len(before.ids) - 16
    same_order = documents[2]
    assert same_order.answers["kvboost"].cached_tokens > documents[1].answers["kvboost"].cached_tokens

    printed = output.getvalue()
    for text in ("A coding assistant.", "A chat.", "Retrieved documents.", "KVBoost: 9 of 9 equal", "What to try next"):
        assert text in printed
