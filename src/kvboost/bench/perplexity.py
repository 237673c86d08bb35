"""Perplexity of models on one text, through the engine: how much a quantised model has lost.

The text is cut into windows, each half a window further on. A window's tokens are predicted from the window alone, and
only those of its second half count (of the first window all but the first token), so that every counted token has at
least half a window before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.api.kvboost import KVBoost
from kvboost.bench import machine
from kvboost.bench.report import Measured, Ratio, Report, Row
from kvboost.bench.runs import command_line
from kvboost.config import WEIGHTS
from kvboost.errors import ConfigError
from kvboost.models.smollm2 import resolve_model

MIN_WINDOW = 16


@dataclass(frozen=True)
class Scores:
    """What one model made of the text. best: its likeliest token at each counted place."""

    log_likelihood: float
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / len(self.best))


def perplexity(models: Sequence[str], text: str, tokens: int, window: int, model_options: dict[str, Any]) -> Report:
    """Models are paths or ids, each with `@int4` and the like behind it when its weights are to be held another way.

    tokens: how many of the text, at most. The first model is the one that the others are compared with. Raises
    `ConfigError`, `ModelLoadError`.
    """
    if window < MIN_WINDOW:
        raise ConfigError("window", f"got {window}; at least {MIN_WINDOW} tokens are needed.")
    content = _read(text)
    ids: list[int] = []
    found: dict[str, Scores] = {}
    rows: list[Row] = []
    dtype = hardware = None
    with machine.OtherCpu() as others:
        for name in models:
            path, weights = _split(name)
            options = {**model_options, "max_model_len": window + 1, **({"weights": weights} if weights else {})}
            with KVBoost.from_pretrained(resolve_model(path), **options) as llm:
                own = _encode(llm, content, tokens, name)
                ids = ids or own
                if own != ids:
                    raise ConfigError("models", f"{name} cuts the text into other tokens than {models[0]}.")
                dtype, hardware = dtype or llm.model.dtype, hardware or machine.hardware(llm.model.device)
                found[name] = score(llm, ids, window)
                rows.append(_row(name, found[name], found[models[0]], sum(p.nbytes for p in llm.model.parameters())))
    first = found[models[0]]
    ratios = [Ratio(f"perplexity, {n} / {models[0]}", s.perplexity, first.perplexity) for n, s in found.items()][1:]
    return Report(
        bench="perplexity",
        command=command_line(),
        model=", ".join(models),
        dtype=str(dtype).removeprefix("torch."),
        versions=machine.versions(),
        hardware=hardware or {},
        limits={},
        measured=Measured(rows, "perplexity", ratios, notes=[_method(text, ids, first, window)]),
        seconds=others.seconds,
        other_cores=others.cores,
    )


def score(llm: KVBoost, ids: Sequence[int], window: int) -> Scores:
    """Predict the tokens of a text from those before them, window by window."""
    total, best = 0.0, []
    for start, counted in windows(len(ids), window):
        piece = list(ids[start : start + window])
        result = llm.generate(piece, max_new_tokens=1, do_sample=False, prompt_logprobs=1)
        places = result.prompt_logprobs or []
        for token, place in zip(piece[counted:], places[counted:], strict=True):
            assert place is not None
            total += place[token].logprob
            best.append(next(other for other, found in place.items() if found.rank == 1))
    return Scores(total, best)


def windows(length: int, window: int) -> Iterator[tuple[int, int]]:
    """(start, first counted place inside) of each window; together they count every token but the first once."""
    half = window // 2
    counted_to = 1
    for start in itertools.count(0, half):
        yield start, counted_to - start
        counted_to = min(length, start + window)
        if counted_to == length:
            return


def _read(text: str) -> str:
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("text", f"{text} could not be read as UTF-8 text ({error}).") from error


def _split(name: str) -> tuple[str, str | None]:
    path, mark, weights = name.rpartition("@")
    return (path, weights) if mark and weights in WEIGHTS else (name, None)


def _encode(llm: KVBoost, content: str, tokens: int, name: str) -> list[int]:
    if llm.tokenizer is None:
        raise ConfigError("models", f"{name} has no tokenizer, and perplexity is measured on text.")
    ids = llm.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise ConfigError("text", "it has fewer than 2 tokens.")
    return list(ids)


def _row(name: str, scores: Scores, first: Scores, weights_bytes: int) -> Row:
    same = sum(a == b for a, b in zip(scores.best, first.best, strict=True)) / len(scores.best)
    return Row(
        name, "text", {"perplexity": scores.perplexity, "same_best_token": same, "weights_mb": weights_bytes / 1e6}
    )


def _method(text: str, ids: Sequence[int], scores: Scores, window: int) -> str:
    return (
        f"{Path(text).name}, its first {len(ids):,} tokens, {len(scores.best):,} of them predicted; windows of {window} tokens, "
        f"{window // 2} apart, of which the second half counts; same best token: as the first model's."
    )
