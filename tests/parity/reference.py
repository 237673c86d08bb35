"""What Transformers itself answers, and how an answer is compared with it. Nothing here goes through KVBoost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from transformers import PreTrainedModel

from families import BY_NAME
from tiny import VOCAB

TIE_LOGITS = 1e-4
"""Two fp32 logits closer than this are a tie: batched and unbatched matrix products differ by about 1e-5 here."""


def prompt(seed: int, length: int) -> list[int]:
    """`length` random token ids, the same for the same seed; a longer prompt does not extend a shorter one."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


class Reference:
    """A pristine model, its greedy answers (batch of one, with its own cache) remembered by prompt."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.name = name
        self._model = model
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """The first `count` greedy tokens after `prompt_ids`, from `model.generate`."""
        key = tuple(prompt_ids)
        if len(self._answers.get(key, [])) < count:
            ids = torch.tensor([list(key)])
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, use_cache=True
            )
            self._answers[key] = out[0, len(key) :].tolist()
            assert len(self._answers[key]) == count, f"{self.name}: the reference stopped early"
        return self._answers[key][:count]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]: row i predicts token i + 1; one forward without a cache."""
        result: torch.Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
        return result

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] natural-log probabilities of the next token."""
        return self.logits(token_ids).log_softmax(-1)

    def assert_same(self, prompt_ids: Sequence[int], got: Sequence[int], count: int, case: str) -> None:
        """`got` must be the `count` greedy tokens. From a tie of the reference's logits on, nothing is compared.

        A tie is reported as a warning; any other difference fails with its place and both logits.
        """
        expected = self.tokens(prompt_ids, count)
        got = list(got)
        if got == expected:
            return
        where = f"{self.name}, {case}, prompt of {len(prompt_ids)}"
        assert len(got) == count, f"{where}: {len(got)} tokens instead of {count}: {got} instead of {expected}"
        at = next(i for i in range(count) if got[i] != expected[i])
        row = self.logits([*prompt_ids, *expected[:at]])[-1]
        ours, theirs = row[got[at]].item(), row[expected[at]].item()
        message = (
            f"{where}: output token {at} (position {len(prompt_ids) + at}) is {got[at]} instead of {expected[at]}; "
            f"the reference's logits are {ours:.5f} and {theirs:.5f}"
        )
        assert abs(ours - theirs) <= TIE_LOGITS, f"{message}\n got      {got}\n expected {expected}"
        warnings.warn(f"tie accepted: {message}", stacklevel=2)


@cache
def reference(name: str) -> Reference:
    """The reference of one family, built once per process."""
    return Reference(BY_NAME[name].build(), name)
