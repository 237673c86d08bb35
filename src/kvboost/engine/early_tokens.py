"""Greedy tokens that are chosen on the device: the next step reads them there, the host when they have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvboost.kernels.triton.host_copies import publish

UNREAD = 2
"""Steps whose tokens may be unread at once: one that runs, and one that was begun ahead of it."""


class EarlyTokens:
    """The tokens of one step."""

    def __init__(self, tokens: Tensor, rows: Sequence[int], box: _Box) -> None:
        self.tokens = tokens
        """`[R]` int32, on the device: the next step may read them there, before another overwrites them."""
        self.rows = rows
        """Which of them each request asked for."""
        self._box, self._use = box, box.use

    def read(self) -> tuple[list[int], list[float]]:
        """Token and logit of each request, once they have arrived. Raises RuntimeError when later steps have taken the place."""
        self._box.wait()
        if self._box.use != self._use:
            raise RuntimeError(
                "the tokens of this step were overwritten by those of later steps before they were read."
            )
        tokens, values = self._box.content(len(self.tokens))
        return [tokens[row] for row in self.rows], [values[row] for row in self.rows]


class TokenPost:
    """Sends tokens to the host. Its pinned memory is its own, so a step that nobody reads leaves nothing behind."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._boxes = [_Box(most_rows, device) for _ in range(UNREAD + 1)]
        self._turn = 0

    def send(self, chosen: Tensor, rows: Sequence[int]) -> EarlyTokens:
        """chosen `[2, R]`: as `kernels.triton.greedy.best_tokens` answers; rows: which of them each request asked for."""
        self._turn = (self._turn + 1) % len(self._boxes)
        box = self._boxes[self._turn]
        box.put(chosen)
        return EarlyTokens(chosen[0], rows, box)


class _Box:
    """Room for the tokens of one step, used again and again; `use` counts."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(2 * most_rows, dtype=torch.int32, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self.use = 0

    def put(self, chosen: Tensor) -> None:
        self.wait()
        self.use += 1
        publish(chosen.view(-1), self._memory[: chosen.numel()])
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def content(self, rows: int) -> tuple[list[int], list[float]]:
        tokens, values = self._memory[: 2 * rows].view(2, rows)
        return tokens.tolist(), values.view(torch.float32).tolist()
