"""Layers streamed to a GPU: the tokens of the resident model, through CUDA graphs and without. Skipped without CUDA."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError, EngineStepError
from kvboost.weights import streaming
from kvboost.weights.budget import Budget
from kvboost.weights.gpu_feeds import CopyFeed, RingFeed
from kvboost.weights.store import HostArena, measure_bus, readable_in_place
from kvboost.weights.streamer import Streamer, streamer_of
from stream_rig import LAYERS, OPTIONS, PROMPTS, answers, budget_gib, own_cache, tiny

__all__ = ["own_cache"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def plan_for(
    monkeypatch: pytest.MonkeyPatch, resident: int, dtype: torch.dtype = torch.float32, host_bytes: int = 1 << 40
) -> None:
    """From now on so many layers stay: a budget of some hundred KiB, which no one asks for, instead of the estimated."""
    model = tiny("llama", dtype)
    table = model.model.embed_tokens.weight.nbytes if readable_in_place(CUDA) else 0
    nbytes = int(budget_gib(model, resident) * 2**30) - table // 4096 * 4096

    def budget(config: EngineConfig, *_: Any) -> Budget:
        return Budget(
            "vram_budget_gib", nbytes, host_bytes=host_bytes, step_tokens=64, max_num_seqs=config.max_num_seqs
        )

    monkeypatch.setattr(streaming, "budget_of", budget)


def load(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> KVBoost:
    return KVBoost.from_model(tiny(family, dtype), vram_budget_gib=1.0, **{**OPTIONS, **options})


def expected(dtype: torch.dtype = torch.float32) -> list[list[int]]:
    with KVBoost.from_model(tiny("llama", dtype).cuda(), **OPTIONS) as kv:
        return answers(kv)


def streamer(kv: KVBoost) -> Streamer:
    found = streamer_of(kv.model)
    assert found is not None
    return found


@pytest.mark.parametrize("resident", [0, 1, LAYERS // 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_equal_those_of_the_resident_model(
    resident: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(dtype)
    plan_for(monkeypatch, resident, dtype)
    with load(dtype=dtype) as kv:
        assert isinstance(streamer(kv)._feed, CopyFeed) and streamer(kv).capturable
        assert abs(len(streamer(kv).plan.resident) - resident) <= 1
        for _ in range(3):  # plain steps, captures, replays
            kv.reset_cache()
            assert answers(kv) == want
            assert [answers(kv, [prompt])[0] for prompt in PROMPTS[:3]] == want[:3]
        assert kv.built.runner._graphs.count > 0, "sweeps are captured"  # type: ignore[attr-defined]
        kv.check()


def test_broken_layers_warmed_up_graphs_and_aborted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected()
    plan_for(monkeypatch, 1)
    with load(max_num_seqs=16) as kv:

        def fail(*_: Any) -> None:
            raise RuntimeError("a layer raised")

        handle = kv.model.model.layers[4].register_forward_pre_hook(fail)
        with pytest.raises(EngineStepError):
            answers(kv)
        handle.remove()
        assert kv.warm_up() > 5
        assert answers(kv) == want
        for piece in kv.stream(PROMPTS[3], max_new_tokens=64, temperature=0, ignore_eos=True):
            if len(piece.token_ids):
                break
        assert answers(kv) == want
        ids = torch.tensor([PROMPTS[0]], device="cuda")
        with torch.no_grad():
            assert torch.allclose(kv.model(ids).logits, tiny("llama").cuda()(ids).logits, atol=1e-3)
        assert answers(kv) == want
        kv.check()


@pytest.mark.parametrize("in_ram", [0, 2])
def test_from_a_drive(in_ram: int, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Layers that RAM has no room for come through a pinned ring; no graphs, the same tokens."""
    size = int(budget_gib(tiny("llama"), 1) * 2**30 - budget_gib(tiny("llama"), 0) * 2**30)
    want = expected()
    plan_for(monkeypatch, 1, host_bytes=in_ram * size)
    with load() as kv:
        assert isinstance(streamer(kv)._feed, RingFeed)
        assert len(list(own_cache.rglob("*.kvl"))) == LAYERS - 1 - in_ram
        for _ in range(2):
            kv.reset_cache()
            assert answers(kv) == want


@pytest.mark.parametrize(("weights", "nbytes"), [("auto", 330_000), ("int4", 120_000)])
def test_a_directory(weights: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path)
    options = {**OPTIONS, "dtype": "float32", "device": "cuda", "weights": weights}
    with KVBoost.from_pretrained(str(tmp_path), **options) as kv:
        want = answers(kv)
    original = streaming.budget_of

    def smaller(*args: Any) -> Budget:
        return dataclasses.replace(original(*args), nbytes=nbytes, kv_bytes=0, workspace_bytes=0)

    monkeypatch.setattr(streaming, "budget_of", smaller)
    with KVBoost.from_pretrained(str(tmp_path), vram_budget_gib=1.0, **options) as kv:
        assert kv.stats().weights is not None
        assert answers(kv) == want


def test_the_embedding_is_read_where_it_is() -> None:
    if not readable_in_place(CUDA):
        pytest.skip("this GPU does not read pinned RAM by itself")
    arena = HostArena([1 << 20], pin=True)
    table = arena.on_gpu(0, CUDA).view(torch.float32).view(-1, 64)
    arena.layer(0).view(torch.float32).copy_(torch.arange(1 << 18, dtype=torch.float32))
    assert table.device == CUDA
    rows = torch.nn.functional.embedding(torch.tensor([3, 0, 4095], device="cuda"), table)
    assert rows[:, 0].tolist() == [192.0, 0.0, 262_080.0]
    torch.cuda.synchronize()
    arena.close()


def test_pinned_copies_are_faster_than_a_slow_bus() -> None:
    assert 1e9 < measure_bus(CUDA) < 1e12


def test_a_budget_above_what_is_free() -> None:
    with pytest.raises(ConfigError, match=r"vram_budget_gib: got 100000\.0, but"):
        KVBoost.from_model(tiny("llama"), vram_budget_gib=100_000.0)
