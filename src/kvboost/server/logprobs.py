"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost.engine.outputs import Logprob, TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

MAX_REMEMBERED = 1 << 16


class TokenTexts:
    """The text of single tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = f"token_id:{token}" if self._tokenizer is None else str(self._tokenizer.decode([token]))
            if len(self._texts) >= MAX_REMEMBERED:
                self._texts.clear()
            self._texts[token] = text
        return text


def chat_logprobs(texts: TokenTexts, tokens: Sequence[int], rows: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, with the `top` likeliest tokens at each place."""
    content = []
    for token, row in zip(tokens, rows, strict=True):
        # The chosen token is in the row even when it is not among the likeliest.
        best = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        content.append({**_entry(texts, token, row[token]), "top_logprobs": [_entry(texts, t, p) for t, p in best]})
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token: int, value: Logprob) -> dict[str, Any]:
    text = texts(token)
    # A token that is part of a character has no text of its own, and its bytes are not known here.
    data = None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "logprob": finite(value.logprob), "bytes": data}


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], rows: Sequence[TokenLogprobs | None], top: int, offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion. A row is None where nothing was predicted: at the first prompt token."""
    words, offsets = [], []
    chosen: list[float | None] = []
    best: list[dict[str, float] | None] = []
    for token, row in zip(tokens, rows, strict=True):
        text = texts(token)
        words.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(None if row is None else finite(row[token].logprob))
        if row is None:
            best.append(None)
        else:
            ordered = sorted(row.items(), key=lambda item: item[1].rank)
            best.append({texts(t): finite(p.logprob) for t, p in ordered[:top]})
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": words, "top_logprobs": best}


def finite(value: float) -> float:
    return max(value, LOWEST)
