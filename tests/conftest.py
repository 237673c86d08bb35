"""What all suites share: marks by folder, the real model, and seeds. Imports torch only where a test needs it.

Marks: everything under `real/` is `real`, everything under `gpu/` is `gpu` and skipped without CUDA; `slow` is set by hand
on what takes more than about ten seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network fails at once instead of waiting
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # tests/triton_rig.py; Triton reads it when first imported

from kvboost.errors import ModelLoadError
from kvboost.models.smollm2 import find_smollm2

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost import KVBoost

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "real":
            item.add_marker(pytest.mark.real)
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in needs_gpu:
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. Where it is not installed tests skip, and in CI they fail."""
    try:
        return find_smollm2()
    except ModelLoadError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[KVBoost]:
    """SmolLM2 in fp32 with a 0.5 GiB KV pool (11,000 tokens). Shared: a test that counts starts with `reset_cache()`."""
    from kvboost import KVBoost

    with KVBoost.from_pretrained(str(smollm2_path), dtype="float32", kv_cache_gib=0.5) as llm:
        yield llm
        llm.check()


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_path: Path) -> PreTrainedModel:
    """The same weights in Transformers alone: the reference. KVBoost never touches this object."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and every order of tests."""
    import random

    random.seed(0)
    import sys

    if "torch" in sys.modules:  # pure policy tests stay free of it
        sys.modules["torch"].manual_seed(0)
