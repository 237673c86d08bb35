"""What is streamed is said: by `kvboost info` before loading, and by stats and metrics while it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvboost import KVBoost
from kvboost.cli.main import app
from kvboost.config import EngineConfig
from kvboost.models.loading import resolve_dtype
from stream_rig import LAYERS, OPTIONS, PROMPTS, answers, budget_gib, own_cache, streamed, tiny

__all__ = ["own_cache"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's budget is made of more")
def test_info_plans_without_loading(tmp_path: Path, own_cache: Path) -> None:
    dtype = resolve_dtype("auto", torch.device("cpu"))
    assert isinstance(dtype, torch.dtype)
    model = tiny("llama", dtype)
    model.save_pretrained(tmp_path)
    budget = budget_gib(model, 2)
    done = CliRunner().invoke(app, ["info", str(tmp_path), "--json", "--weights-budget-gib", repr(4 * budget)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["streaming"].startswith(f"all {LAYERS} layers resident")
    done = CliRunner().invoke(app, ["info", str(tmp_path), "--json", "--weights-budget-gib", repr(budget)])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["streaming"].startswith(f"2 of {LAYERS} layers resident, {LAYERS - 2} streamed from disk")
    assert "sweeps/s" in facts["streaming"]
    assert facts["parameters"] is None, "nothing was loaded"
    assert not list(own_cache.rglob("*.kvl"))


def test_stats_count_what_was_loaded() -> None:
    with streamed("llama", 1) as kv:
        before = kv.stats().weights
        assert before is not None
        answers(kv, PROMPTS[:1], max_new_tokens=4)
        after = kv.stats().weights
        assert after is not None
        loaded = after.loaded_bytes - before.loaded_bytes
        assert loaded >= 4 * after.sweep_bytes and loaded % (after.sweep_bytes // (LAYERS - 1)) == 0
        assert after.stall_s >= before.stall_s >= 0 and after.link_bytes_per_s > 0
        assert kv.stats().as_dict()["weights"]["layers_streamed"] == LAYERS - 1
    with KVBoost.from_model(tiny("llama"), **OPTIONS) as kv:
        assert kv.stats().weights is None


def test_metrics_tell_of_streaming_where_there_is_some() -> None:
    pytest.importorskip("prometheus_client")
    from kvboost.server.mailbox import Mailbox
    from kvboost.server.metrics import Metrics

    async def text(kv: KVBoost) -> str:
        return Metrics("tiny", Mailbox(kv.engine)).text().decode()

    with streamed("llama", 2) as kv:
        shown = asyncio.run(text(kv))
        weights = kv.stats().weights
        assert weights is not None
        assert 'kvboost:weight_layers{model_name="tiny",state="resident"} 2.0' in shown
        assert f'kvboost:weight_layers{{model_name="tiny",state="streamed"}} {LAYERS - 2}.0' in shown
        line = next(row for row in shown.splitlines() if row.startswith("kvboost:weight_loaded_bytes_total"))
        assert float(line.split()[-1]) == weights.loaded_bytes
    with KVBoost.from_model(tiny("llama"), **OPTIONS) as kv:
        assert "kvboost:weight_" not in asyncio.run(text(kv))


def test_steps_are_larger_when_layers_are_streamed() -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "max_num_batched_tokens"}
    model = tiny("llama")
    with KVBoost.from_model(model, **options) as kv:
        assert kv.config.max_num_batched_tokens == 2048
    with KVBoost.from_model(model, weights_budget_gib=budget_gib(model, 1), **options) as kv:
        assert kv.config.max_num_batched_tokens == 4096
    assert EngineConfig().weights_budget_gib is None and EngineConfig().vram_budget_gib is None
