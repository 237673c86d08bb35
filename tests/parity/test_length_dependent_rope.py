"""Rope whose angles depend on the length of the whole batch: served exactly, or refused before any token.

Dynamic NTK and longrope rotate every key of a forward by the longest position in it. In a packed batch a long sequence
would change a short one's keys, and cached keys would stop being the ones Transformers computes.
"""

from __future__ import annotations

import pytest
import torch

from families import BORDER, BY_NAME, LENGTH_DEPENDENT
from kvboost import KVBoost
from kvboost.errors import KVBoostError, UnsupportedModel
from reference import Reference, prompt
from tiny import Family

SHORT, LONG, NEW = 20, 80, 12
"""Prompts below and above the border, and what is generated after them."""


def expected(family: Family, ids: list[int]) -> list[int]:
    """From a fresh model each time: dynamic NTK keeps the longest length it has seen."""
    return Reference(family.build(), family.name).tokens(ids, NEW)


@pytest.mark.parametrize("family", LENGTH_DEPENDENT, ids=str)
def test_short_sequences_beside_long_ones(family: Family) -> None:
    short, long = prompt(1, SHORT), prompt(2, LONG)
    try:
        kv = KVBoost.from_model(family.build(), num_blocks=64)
    except UnsupportedModel as refusal:
        assert "rope" in str(refusal).lower()
        return
    with kv:
        try:
            batch = kv.generate([long, short], max_new_tokens=NEW, temperature=0, ignore_eos=True)
        except KVBoostError as refusal:
            assert kv.max_model_len <= BORDER, refusal
            batch = None
        alone = kv.generate(short, max_new_tokens=NEW, temperature=0, ignore_eos=True)
        kv.check()
    assert alone.token_ids == expected(family, short)
    if batch is not None:
        assert batch[0].token_ids == expected(family, long), "the long sequence differs"
        assert batch[1].token_ids == expected(family, short), "a long neighbour changed a short sequence"


@pytest.mark.parametrize("family", LENGTH_DEPENDENT, ids=str)
def test_a_sequence_that_grows_past_the_border(family: Family) -> None:
    """Six tokens below the border, twelve more to make: the same as Transformers, or never generated."""
    ids = prompt(3, BORDER - 6)
    try:
        with KVBoost.from_model(family.build(), num_blocks=64) as kv:
            result = kv.generate(ids, max_new_tokens=NEW, temperature=0, ignore_eos=True)
            limit = kv.max_model_len
    except KVBoostError as refusal:
        assert any(word in str(refusal).lower() for word in ("rope", "max_model_len", "max_tokens")), refusal
        return
    want = expected(family, ids)
    assert result.token_ids == want[: len(result.token_ids)]
    assert len(result.token_ids) == NEW or len(ids) + len(result.token_ids) >= limit


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "phi3-longrope"])
def test_the_families_of_the_suite_say_where_they_end(name: str) -> None:
    """Served up to the border when `max_model_len` is left alone, and never beyond it by default."""
    family = BY_NAME[name]
    assert family.exact_len is not None
    with KVBoost.from_model(family.build(), num_blocks=64) as kv:
        assert kv.max_model_len <= family.exact_len


@pytest.mark.parametrize("family", LENGTH_DEPENDENT, ids=str)
def test_a_long_forward_of_the_user_leaves_no_trace(family: Family) -> None:
    """The user's own forward past the border rewrites the rotary frequencies inside the shared model."""
    model = family.build()
    short = prompt(1, SHORT)
    with KVBoost.from_model(model, num_blocks=64) as kv:
        model(torch.tensor([prompt(2, LONG)]))
        result = kv.generate(short, max_new_tokens=NEW, temperature=0, ignore_eos=True)
    assert result.token_ids == expected(family, short)
