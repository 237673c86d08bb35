"""Small copies over the bus by kernels: what the host wrote last is what arrives, in the order of the stream."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvboost.engine.early_tokens import TokenPost
from kvboost.kernels.triton.host_copies import WORDS, fetch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_words", [9, WORDS, 70_001])
def test_the_host_may_write_again_and_again(num_words: int) -> None:
    """Two pinned buffers in turn, as in `StepTensors`; nothing stale comes out of a cache, and no kernel that still reads
    what was there before sees it change."""
    hosts = [torch.zeros(8 * num_words, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sent = [torch.cuda.Event() for _ in hosts]
    device = torch.zeros(8 * num_words, dtype=torch.uint8, device="cuda")
    slow = torch.randn(4096, 4096, device="cuda")
    seen = []
    for step in range(24):
        host, event = hosts[step % 2], sent[step % 2]
        event.synchronize()
        host.view(torch.int64)[:] = torch.arange(num_words) * 1000 + step
        fetch(host, device)
        event.record()
        slow = slow @ slow / 64.0  # the host is far ahead of the device
        seen.append(device.view(torch.int64).clone())
    for step, got in enumerate(seen):
        assert got.cpu().equal(torch.arange(num_words) * 1000 + step), step


def test_tokens_go_to_the_next_step_and_to_the_host() -> None:
    post, rows = TokenPost(512, torch.device("cuda")), 300
    host = torch.zeros(8 * rows, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(8 * rows, dtype=torch.uint8, device="cuda")
    chosen = torch.empty(2, rows, dtype=torch.int32, device="cuda")  # static, as a graph's output
    order = torch.randperm(rows)
    host.view(torch.int64)[:] = -1 - order
    slow, before = torch.randn(4096, 4096, device="cuda"), None
    for step in range(12):
        slow = slow @ slow / 64.0
        chosen[0] = torch.arange(rows, device="cuda") + 1000 * step
        chosen[1] = torch.full((rows,), step + 0.5, device="cuda").view(torch.int32)
        early = post.send(chosen, [5, rows - 1])
        fetch(host, device, rows, early.tokens)
        if before is not None:
            assert before.read() == ([1000 * (step - 1) + 5, 1000 * (step - 1) + rows - 1], [step - 0.5] * 2)
        before = early
    assert device.view(torch.int64).cpu().equal(order + 11_000)
