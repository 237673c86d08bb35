"""Changes to logits that a request asks for (biases, bans, penalties), and the random number of each draw.

Everything is applied in place to fp32 scores `[rows, vocab]`, for all rows at once through flat indices, in
Transformers' order. Knows nothing of temperature and filters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kvboost.engine.grammar import GrammarState, TokenMasks
from kvboost.engine.sampling_params import SamplingParams
from kvboost.errors import EngineStepError

Processor = Callable[[Tensor, Tensor], Tensor]
"""Transformers' LogitsProcessor: `f(input_ids[1, n], scores[1, V]) -> scores[1, V]`."""

_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


class SampleError(EngineStepError):
    """No token can be picked for `rows` (their indices in the batch); the other rows are fine without them."""

    def __init__(self, rows: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


@dataclass(slots=True)
class SampleRow:
    """What is needed to pick the token of one row of logits.

    `len(output_ids)` is also the position of the draw: with `seed` it fixes the random number. `stop_ids` cannot be
    picked while `len(output_ids) < params.min_tokens`, unless `grammar` allows nothing else.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    stop_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    processors: tuple[Processor, ...] = ()
    grammar: GrammarState | None = None


def changes_logits(row: SampleRow) -> bool:
    """Whether `change_logits_` has anything to do for this row."""
    p = row.params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or p.allowed_token_ids is not None
        or row.bad_word_ids
        or row.processors
        or row.grammar is not None
        or (p.min_tokens and row.stop_ids and len(row.output_ids) < p.min_tokens)
    )


def change_logits_(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply what the rows ask for to `scores [R, V]` (fp32, contiguous), in place.

    Token ids outside the vocabulary are skipped: some models have fewer logits than embeddings.
    Raises `SampleError` when a custom processor fails.
    """
    masks = _grammar_masks(rows)
    _add_biases(scores, rows)
    _keep_allowed(scores, rows)
    _forbid(scores, rows, masks)
    _penalise_repetition(scores, rows)
    _penalise_output(scores, rows)
    for i, row in enumerate(rows):
        if row.processors:
            _run_processors(scores, i, row)
    if masks is not None:
        masks.apply_(scores)  # last: a processor may write over what was forbidden before


def uniforms(rows: Sequence[SampleRow]) -> list[float]:
    """One number in [0, 1) per row, a pure function of its seed and position."""
    return [uniform(row.seed, len(row.output_ids)) for row in rows]


def uniform(seed: int, position: int) -> float:
    """53 bits of splitmix64 (Steele, Lea, Flood 2014) at `position` of the stream that `seed` selects."""
    start = _mix(seed & _MASK64)
    return (_mix((start + (position + 1) * _GAMMA) & _MASK64) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _flat(scores: Tensor, tokens: Sequence[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """(index into `scores.view(-1)`, row) of each token of each row; tokens outside the vocabulary are left out."""
    lists = [list(t) for t in tokens]
    ids = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.long, device=scores.device)
    lengths = torch.tensor([len(t) for t in lists], device=scores.device)
    row = torch.repeat_interleave(torch.arange(len(lists), device=scores.device), lengths)
    inside = ids < scores.shape[1]
    ids, row = ids[inside], row[inside]
    return row * scores.shape[1] + ids, row


def _per_row(scores: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device)


def _add_biases(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    biases = [row.params.logit_bias or {} for row in rows]
    if not any(biases):
        return
    vocab = scores.shape[1]
    index, _ = _flat(scores, biases)
    added = _per_row(scores, [value for bias in biases for token, value in bias.items() if token < vocab])
    scores.view(-1)[index] += added


def _keep_allowed(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    limited = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is not None]
    if not limited:
        return
    index, _ = _flat(scores, [row.params.allowed_token_ids or () for row in rows])
    kept = scores.view(-1)[index]
    scores[limited] = -torch.inf
    scores.view(-1)[index] = kept


def _forbid(scores: Tensor, rows: Sequence[SampleRow], masks: TokenMasks | None) -> None:
    banned: list[list[int]] = [[] for _ in rows]
    for i, row in enumerate(rows):
        if len(row.output_ids) < row.params.min_tokens:
            # A grammar that is complete outranks min_tokens: otherwise no token would be left.
            if masks is None or row.grammar is None or not masks.leaves_only(i, row.stop_ids):
                banned[i] += row.stop_ids
        if row.bad_word_ids:
            banned[i] += _next_of_bad_words(row)
    if any(banned):
        index, _ = _flat(scores, banned)
        scores.view(-1)[index] = -torch.inf


def _grammar_masks(rows: Sequence[SampleRow]) -> TokenMasks | None:
    """The masks of all rows with a grammar, at once; None when there is no such row."""
    states = [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]
    if not states:
        return None
    if lost := [i for i, grammar in states if not grammar.follow(rows[i].output_ids)]:
        raise SampleError(lost, "a token was generated that the grammar does not allow.")
    return TokenMasks(states, len(rows))


def _next_of_bad_words(row: SampleRow) -> list[int]:
    """Tokens that would complete a bad word after prompt and output (Transformers' NoBadWords rule)."""
    longest = max(len(word) for word in row.bad_word_ids) - 1
    tail = list(row.output_ids[max(0, len(row.output_ids) - longest) :])
    if len(tail) < longest:
        missing = longest - len(tail)
        tail = [*row.prompt_ids[max(0, len(row.prompt_ids) - missing) :], *tail]
    found = []
    for *before, last in row.bad_word_ids:
        if len(before) <= len(tail) and tail[len(tail) - len(before) :] == before:
            found.append(last)
    return found


def _penalise_repetition(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    penalties = [row.params.repetition_penalty for row in rows]
    if all(p == 1.0 for p in penalties):
        return
    seen = [chain(r.prompt_ids, r.output_ids) if p != 1.0 else () for r, p in zip(rows, penalties, strict=True)]
    index, row = _flat(scores, seen)
    penalty = _per_row(scores, penalties)[row]
    score = scores.view(-1)[index]
    # Repeated tokens write the same value several times.
    scores.view(-1)[index] = torch.where(score < 0, score * penalty, score / penalty)


def _penalise_output(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    presence = [row.params.presence_penalty for row in rows]
    frequency = [row.params.frequency_penalty for row in rows]
    asked = [bool(p or f) for p, f in zip(presence, frequency, strict=True)]
    if not any(asked):
        return
    index, _ = _flat(scores, [r.output_ids if a else () for r, a in zip(rows, asked, strict=True)])
    index, count = torch.unique(index, return_counts=True)
    row = index // scores.shape[1]
    scores.view(-1)[index] -= _per_row(scores, presence)[row] + _per_row(scores, frequency)[row] * count


def _run_processors(scores: Tensor, i: int, row: SampleRow) -> None:
    ids = torch.tensor([[*row.prompt_ids, *row.output_ids]], dtype=torch.long, device=scores.device)
    for processor in row.processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            changed = processor(ids, scores[i : i + 1].clone())
            scores[i : i + 1] = changed
        except Exception as error:
            raise SampleError([i], f"logits processor {name} failed: {type(error).__name__}: {error}") from error
