"""Inputs of a step on their way to the device, tokens on their way to the host; on pinned memory in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from triton_rig import interpreted

pytest.importorskip("triton")

from kvboost.engine.early_tokens import UNREAD, TokenPost
from kvboost.kernels.triton.host_copies import WORDS, fetch, publish

pytestmark = interpreted


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).view(torch.uint8)


@pytest.mark.parametrize("count", [1, 7, WORDS, 2 * WORDS + 3])
def test_all_bytes_arrive(count: int) -> None:
    host = torch.randint(0, 256, (8 * count,), dtype=torch.uint8)
    device = torch.zeros(8 * count + 64, dtype=torch.uint8)
    fetch(host, device[: 8 * count])
    assert device[: 8 * count].equal(host) and not device[8 * count :].any()


def test_open_ids_become_what_was_chosen() -> None:
    chosen = torch.tensor([70, 80, 90], dtype=torch.int32)
    host = words(-3, 5, -1, -1, -2, -7)
    device = torch.zeros(48, dtype=torch.uint8)
    fetch(host, device, 4, chosen)
    assert device.view(torch.int64).tolist() == [90, 5, 70, 70, -2, -7], "only the first four are ids"


def test_sizes_that_do_not_fit_are_refused() -> None:
    device = torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="16 bytes to 32"):
        fetch(words(1, 2), device)
    with pytest.raises(ValueError, match="multiple of 8"):
        fetch(torch.zeros(12, dtype=torch.uint8), device[:12])
    with pytest.raises(ValueError, match="int32 of one shape"):
        publish(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def test_tokens_and_their_logits_arrive_for_the_rows_asked_for() -> None:
    post = TokenPost(8, torch.device("cpu"))
    chosen = torch.stack([torch.tensor([11, 12, 13]), torch.tensor([1.5, -2.0, 0.25]).view(torch.int32)]).int()
    early = post.send(chosen, [2, 0])
    assert early.tokens.tolist() == [11, 12, 13]
    assert early.read() == ([13, 11], [0.25, 1.5])


def test_steps_keep_their_tokens_until_a_later_one_takes_the_place() -> None:
    post = TokenPost(1, torch.device("cpu"))
    sent = [post.send(torch.tensor([[i], [0]], dtype=torch.int32), [0]) for i in range(UNREAD + 2)]
    assert [early.read()[0] for early in sent[1:]] == [[1], [2], [3]]
    with pytest.raises(RuntimeError, match="overwritten"):
        sent[0].read()
