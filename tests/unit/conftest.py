"""A tiny Llama with a word-level tokenizer and a chat template: everything a caller can do, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_models import byte_tokenizer, tiny_llama
from kvboost import KVBoost
from kvboost.kernels.native import build, library


@pytest.fixture(params=["vectors", "emulated tiles"])
def other_units(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernels as a processor without matrix units compiles them, and as one with them does, these in software."""
    if build.platform.machine() != "x86_64" or "avx512_bf16" not in build._processor():
        pytest.skip("needs AVX-512 with bf16 products")
    emulated = request.param != "vectors"
    flags = ("-mno-amx-tile", "-mno-amx-bf16")
    if emulated:
        flags = ("-D__AMX_TILE__=1", "-D__AMX_BF16__=1", "-include", str(Path(__file__).parents[1] / "amx_emulated.h"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    assert library.load().kvb_has_amx() == emulated


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model saved as a model directory with its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tiny() -> Iterator[KVBoost]:
    """A fresh engine around the tiny model: 64 blocks of 16 tokens. Its invariants are checked at the end."""
    kv = KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=64, max_num_batched_tokens=64)
    yield kv
    if not kv.engine.closed:
        kv.check()
        stats = kv.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.blocks_referenced == stats.blocks_pinned
    kv.close()
