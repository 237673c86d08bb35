"""Whether engines gave the same tokens, and if not, how close the choice was."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.bench.workloads import common_prefix

TIE_FACTOR = 2.0
"""A gap of at most this many times the model's own rounding error counts as a tie: either logit may be off by it."""


@dataclass(frozen=True)
class Difference:
    """Where two answers part. Logits are Transformers' own; rounding is how far two exact ways of computing them differ."""

    position: int
    expected: int
    got: int
    expected_logit: float
    got_logit: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return abs(self.expected_logit - self.got_logit) <= TIE_FACTOR * self.rounding


def count_agreement(answers: Mapping[str, Sequence[Sequence[int]]], reference: str = "transformers") -> dict[str, str]:
    """Per engine, how many answers have the reference's tokens; empty without a reference. Text-only answers are left out."""
    if reference not in answers:
        return {}
    told = {}
    for engine, own in answers.items():
        pairs = [(list(a), list(b)) for a, b in zip(own, answers[reference], strict=False) if a]
        if engine != reference and pairs:
            told[engine] = (
                f"{sum(a == b for a, b in pairs)} of {len(pairs)} equal to those of {reference}, token for token"
            )
    return told


def find_difference(
    model: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    """None when the answers are equal. An answer that ends early differs where it ends; its token there is given as -1."""
    if list(expected) == list(got):
        return None
    at = common_prefix(expected, got)
    wanted = expected[at] if at < len(expected) else -1
    given = got[at] if at < len(got) else -1
    ids = [*prompt, *expected[:at]]
    whole = _last_logits(model, ids)
    split = _last_logits(model, ids, cut=len(ids) // 2)
    logit = lambda token: float(whole[token]) if token >= 0 else float("nan")  # noqa: E731
    return Difference(at, wanted, given, logit(wanted), logit(given), float((whole - split).abs().max()))


def _last_logits(model: Any, ids: Sequence[int], cut: int = 0) -> torch.Tensor:
    """Logits after the last token, [vocabulary], float32: in one pass, or in two with the KV of the first `cut` kept."""
    from transformers import DynamicCache

    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    pieces = [ids[:cut], ids[cut:]] if cut else [ids]
    with torch.inference_mode():
        for piece in pieces:
            tokens = torch.tensor([list(piece)], device=model.device)
            output = model(tokens, use_cache=True, **{cache_name: cache})
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits
