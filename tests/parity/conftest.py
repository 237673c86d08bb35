"""Shared set-up of the parity suite: its helper modules are importable, and tiny models run on one core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Splitting a matrix of 48 x 80 over cores costs more than multiplying it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
