"""What cannot be served exactly is refused at load, with the reason in the message, and left as it was."""

from __future__ import annotations

import pytest
import torch

from families import BY_NAME
from kvboost import KVBoost
from kvboost.errors import KVBoostError, UnsupportedModel
from reference import prompt
from refused import REFUSED, Refused


@pytest.mark.parametrize("refused", REFUSED, ids=str)
@pytest.mark.parametrize("path", ["auto", "compat"])
def test_refused(refused: Refused, path: str) -> None:
    model = refused.build()
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        KVBoost.from_model(model, num_blocks=16, path=path)
    message = str(caught.value).lower()
    assert any(reason in message for reason in refused.reasons), message
    assert model.config._attn_implementation == implementation


def test_refused_model_still_works() -> None:
    """A refusal has no side effect: Mamba generates the same before and after."""
    model = next(refused for refused in REFUSED if refused.name == "mamba").build()
    ids = torch.tensor([prompt(1, 9)])
    before = model.generate(ids, max_new_tokens=8, do_sample=False)
    with pytest.raises(UnsupportedModel):
        KVBoost.from_model(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), before)


@pytest.mark.parametrize("name", ["falcon-new", "falcon-alibi", "mpt", "bloom", "gpt-neo"])
def test_paged_path_cannot_be_forced(name: str) -> None:
    """`path="paged"` on a model that never calls the attention interface would silently ignore the pool."""
    with pytest.raises(KVBoostError, match=r"(?i)paged|compat|interface"):
        KVBoost.from_model(BY_NAME[name].build(), num_blocks=16, path="paged")
