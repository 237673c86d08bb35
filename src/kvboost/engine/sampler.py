"""One sampler for a whole batch: picks the next token of every row of logits, each by its own parameters.

Temperature, top-k, top-p and min-p mean what Transformers' warpers mean. A draw is the inverse of the cumulative
distribution at one number that depends on the request's seed and position only: the same tokens come out whatever
else is in the batch, and after a preemption. For that, no choice here may depend on another row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvboost.engine.outputs import Logprob, TokenLogprobs
from kvboost.engine.sampling_ops import SampleError, SampleRow, change_logits_, changes_logits, uniforms
from kvboost.engine.sampling_params import SamplingParams

__all__ = ["SampleError", "SampleRow", "Sampled", "bad_word_sequences", "sample", "token_logprobs"]

_BLOCK = 256
"""Width of one piece of the vocabulary. Pieces first, then inside one piece: 5 to 10 times faster than a cumsum or an
argmax over the whole row on a CPU."""

_FIRST_WIDTH = 256
"""Best tokens looked at first for top-p and min-p; 95% of a language model's mass is nearly always inside."""

_WIDEN = 8
"""Factor for rows whose kept set did not fit: 256, 2048, then the whole vocabulary."""

_LOGPROB_ELEMENTS = 4 * 2**20
"""Logits turned to fp32 at once for log-probabilities (16 MiB): a prompt has a row per token."""


class Sampled(NamedTuple):
    """Per row: the token, and its log-probabilities where `params.logprobs` asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


@torch.no_grad()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Pick one token per row of `logits [R, V]` (any float type; left unchanged).

    Raises `SampleError`, naming the rows, when every token is forbidden, a logit is NaN or infinite, or a custom
    processor fails.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
    if not rows:
        return Sampled([], [])
    tokens = _choose(logits, rows)
    return Sampled(tokens, _sampled_logprobs(logits, rows, tokens))


def check_greedy(tokens: Sequence[int], values: Sequence[float]) -> Sampled:
    """What `sample` answers for greedy rows whose best tokens and their logits are known. Raises `SampleError` alike."""
    return Sampled(_require_finite(tokens, values, range(len(tokens))), [None] * len(tokens))


@torch.no_grad()
def token_logprobs(logits: Tensor, chosen: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-softmax of raw `logits [R, V]` at the chosen token of each row and at its `count` best tokens.

    The chosen token comes first. Equal tokens share a rank.
    """
    vocab = logits.shape[1]
    count = min(count, vocab)
    step = max(1, _LOGPROB_ELEMENTS // vocab)
    found: list[TokenLogprobs] = []
    for begin in range(0, len(chosen), step):
        scores = logits[begin : begin + step].float()
        tokens = torch.tensor(chosen[begin : begin + step], device=scores.device)[:, None]
        norm = scores.logsumexp(-1, keepdim=True)
        picked = scores.gather(1, tokens)
        ranks = (scores > picked).sum(-1) + 1
        best, ids = scores.topk(count, dim=-1)
        for token, logprob, rank, values, others in zip(
            tokens[:, 0].tolist(),
            (picked - norm)[:, 0].tolist(),
            ranks.tolist(),
            (best - norm).tolist(),
            ids.tolist(),
            strict=True,
        ):
            entry = {token: Logprob(logprob, rank)}
            place = 1
            for i, (other, value) in enumerate(zip(others, values, strict=True)):
                place = place if i and value == values[i - 1] else i + 1
                entry.setdefault(other, Logprob(value, place))
            found.append(entry)
    return found


def bad_word_sequences(bad_words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token sequences to forbid: each word as a text begins with it, and as it follows a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def _sampled_logprobs(logits: Tensor, rows: Sequence[SampleRow], tokens: list[int]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    by_count: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            by_count.setdefault(row.params.logprobs, []).append(i)
    for count, asked in by_count.items():
        for i, entry in zip(asked, token_logprobs(logits[asked], [tokens[i] for i in asked], count), strict=True):
            found[i] = entry
    return found


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    others = [i for i, row in enumerate(rows) if not row.params.greedy or changes_logits(row)]
    if not others:
        return _checked(*_best(logits), range(len(rows)))
    tokens = [0] * len(rows)
    if len(others) < len(rows):
        chosen = set(others)
        plain = [i for i in range(len(rows)) if i not in chosen]
        _put(tokens, plain, _checked(*_best(logits[plain]), plain))
    whole = len(others) == len(rows)
    scores = logits.to(torch.float32, copy=True).contiguous() if whole else logits[others].float()
    _put(tokens, others, _choose_changed(scores, [rows[i] for i in others], others))
    return tokens


def _choose_changed(scores: Tensor, rows: Sequence[SampleRow], names: Sequence[int]) -> list[int]:
    """Tokens for fp32 `scores [R, V]`, which may be overwritten; `names` are the rows' places in the batch."""
    try:
        change_logits_(scores, rows)
    except SampleError as error:
        raise SampleError([names[i] for i in error.rows], str(error)) from error.__cause__
    best, top = _best(scores)
    tokens = _checked(best, top, names)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        picked = _draw(_rows(scores, drawn), top[drawn], [rows[i] for i in drawn])
        _put(tokens, drawn, picked.tolist())
    return tokens


def _draw(scores: Tensor, top: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """One random token `[R]` per row of `scores [R, V]` (overwritten), whose largest values are `top [R]`."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=scores.device)
    # The largest becomes 0 first: dividing by a tiny temperature cannot overflow upwards.
    limits = torch.finfo(torch.float32)
    scores.sub_(top[:, None]).div_(temperature.clamp(limits.tiny, limits.max)[:, None])
    # softmax works row by row; sums over one row alone may be split between threads and end in other bits.
    probs = scores.softmax(-1)
    u = torch.tensor(uniforms(rows), dtype=torch.float64, device=scores.device)
    tokens = torch.empty(len(rows), dtype=torch.long, device=scores.device)
    waiting: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        waiting.setdefault(_first_width(row.params, scores.shape[1]), []).append(i)
    if unfiltered := waiting.pop(0, None):
        tokens[unfiltered] = _draw_all(_rows(probs, unfiltered), u[unfiltered])
    while waiting:
        width = min(waiting)
        group = waiting.pop(width)
        params = [rows[i].params for i in group]
        picked, complete = _draw_best(_rows(scores, group), _rows(probs, group), u[group], params, width)
        tokens[group] = picked
        wider = [i for i, done in zip(group, complete.tolist(), strict=True) if not done]
        if wider:
            waiting.setdefault(_rung(width * _WIDEN, scores.shape[1]), []).extend(wider)
    return tokens


def _first_width(params: SamplingParams, vocab: int) -> int:
    """How many of the best tokens to look at first; 0 when no filter is on.

    Only the row's own parameters count: which of two equal logits comes first may depend on the width.
    """
    if 0 < params.top_k < vocab:
        return _rung(max(64, 1 << params.top_k.bit_length()), vocab)  # above top_k: shows whether the k-th has ties
    return _rung(_FIRST_WIDTH, vocab) if params.top_p < 1.0 or params.min_p > 0.0 else 0


def _rung(width: int, vocab: int) -> int:
    return width if width <= vocab // 8 else vocab  # a sort is cheaper than a wide topk and a second try


def _draw_all(probs: Tensor, u: Tensor) -> Tensor:
    """Draw from `probs [R, V]` in vocabulary order."""
    vocab = probs.shape[1]
    main = vocab - vocab % _BLOCK
    sums = probs[:, :main].unflatten(1, (-1, _BLOCK)).sum(-1)
    if main < vocab:
        sums = torch.cat([sums, probs[:, main:].sum(-1, keepdim=True)], dim=1)
    ends = sums.double().cumsum(-1)
    target = u * ends[:, -1]
    block = _first_above(ends, target)
    before = ends.gather(1, block) - sums.double().gather(1, block)
    at = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, at.clamp(max=vocab - 1)).double().masked_fill_(at >= vocab, 0.0)
    return (block * _BLOCK + _first_above(inside.cumsum(-1), target - before[:, 0]))[:, 0]


def _draw_best(
    scores: Tensor, probs: Tensor, u: Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[Tensor, Tensor]:
    """Draw among the `width` best tokens of each row after top-k, top-p and min-p.

    Returns tokens `[R]` and whether each row's kept set was entirely among them; where not, the token means nothing.
    """
    vocab, device = scores.shape[1], scores.device
    if width < vocab:
        values, ids = scores.topk(width, dim=-1)
    else:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
    weights = probs.gather(1, ids).double()
    # The kept set is a beginning of the descending order, whichever filters are on.
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else 0 for p in params], device=device)[:, None]
    limited = top_k > 0
    worst = values.gather(1, (top_k - 1).clamp(min=0)).masked_fill(~limited, -torch.inf)
    weights.masked_fill_(values < worst, 0.0)
    ends = weights.cumsum(-1)
    total = torch.where(limited, ends[:, -1:], 1.0)
    limit = [[p.top_p if p.top_p < 1.0 else torch.inf] for p in params]  # rounding must not cut the tail at 1.0
    top_p = torch.tensor(limit, dtype=torch.float64, device=device)
    min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float64, device=device)
    keep = (weights > 0) & (ends - weights < top_p * total) & (weights >= min_p * weights[:, :1])
    complete = ~keep[:, -1] if width < vocab else torch.ones_like(keep[:, -1])
    ends = weights.masked_fill_(~keep, 0.0).cumsum(-1)
    place = _first_above(ends, u * ends[:, -1])
    return ids.gather(1, place)[:, 0], complete


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Index `[R, 1]` of the first of the running sums `ends [R, N]` above `target [R]`: never one of zero weight."""
    last = ends[:, -1]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last))).clamp(min=0.0)
    return torch.searchsorted(ends.contiguous(), target[:, None].contiguous(), right=True)


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(index, value) `[R]` of the largest of each row, the first among equals; a NaN counts as the largest."""
    rows, vocab = scores.shape
    main = vocab - vocab % _BLOCK
    if scores.device.type != "cpu" or main == 0:
        best = scores.argmax(-1)
        return best, scores.gather(1, best[:, None])[:, 0]
    # amax is vectorised on the CPU and argmax is not: 1 ms against 10 ms for 64 x 49152.
    blocks = scores[:, :main].unflatten(1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(rows), block].argmax(-1)
    best = block * _BLOCK + inside
    top = scores.gather(1, best[:, None])[:, 0]
    if main < vocab:
        rest, at = scores[:, main:].max(-1)
        in_rest = (rest > top) | rest.isnan()
        best = torch.where(in_rest, main + at, best)
        top = torch.where(in_rest, rest, top)
    return best, top


def _checked(best: Tensor, top: Tensor, names: Sequence[int]) -> list[int]:
    """Tokens as a list, after one copy to the host. Raises `SampleError` for rows without a finite best logit."""
    tokens, values = torch.stack([best.double(), top.double()]).tolist()
    return _require_finite(tokens, values, names)


def _require_finite(tokens: Sequence[float], values: Sequence[float], names: Sequence[int]) -> list[int]:
    bad = [i for i, value in enumerate(values) if not -torch.inf < value < torch.inf]
    if bad:
        forbidden = [names[i] for i in bad if values[i] == -torch.inf]
        if forbidden:
            raise SampleError(
                forbidden,
                "every token is forbidden: allowed_token_ids, bad_words, min_tokens, structured_outputs and processors together "
                "leave none. Relax one of them.",
            )
        raise SampleError(
            [names[i] for i in bad],
            f"the model's logits are {values[bad[0]]}: a number overflowed. Try dtype='float32' or 'bfloat16'.",
        )
    return [int(token) for token in tokens]


def _rows(x: Tensor, index: Sequence[int]) -> Tensor:
    """`x[index]`, without a copy when that is all of it. `index` is ascending."""
    return x if len(index) == x.shape[0] else x[list(index)]


def _put(into: list[int], places: Sequence[int], values: Sequence[int]) -> None:
    for place, value in zip(places, values, strict=True):
        into[place] = value
