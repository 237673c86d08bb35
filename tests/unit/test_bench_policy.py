"""The torch-free benches, small: their figures are held to the same limits as the full runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.bench.policy import (
    TraceRow,
    azure_lengths,
    ideal_hit_rates,
    main,
    measure_index,
    measure_waste,
    mixed_lengths,
    read_trace,
    replay,
    static_batches,
)

DATA = Path(os.environ.get("KVBOOST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "trace_mooncake_conversation.jsonl").exists(), reason=f"no traces in {DATA}"
)


def test_ideal_lru_by_hand() -> None:
    rows = [TraceRow(1024, (1, 2)), TraceRow(1000, (1, 3)), TraceRow(1024, (1, 2))]
    assert ideal_hit_rates(rows, None) == (3 / 6, 1536 / 3048)
    assert ideal_hit_rates(rows, 2) == (2 / 6, 1024 / 3048)  # 2 was the least recent when 3 came


def test_replay_by_hand() -> None:
    """The second prompt's last block is not full and the third one's last token is computed: one hit each."""
    rows = [TraceRow(1024, (1, 2)), TraceRow(1000, (1, 3)), TraceRow(1024, (1, 2))]
    result = replay("by hand", rows, None)
    assert result.hit_rate == 2 * 512 / 3048 and result.refused == 0
    assert replay("small", rows, 1024).refused == 2


@needs_data
@pytest.mark.parametrize("capacity", [None, 500_000])
def test_replay_finds_what_an_ideal_lru_finds(capacity: int | None) -> None:
    rows = read_trace(DATA / "trace_mooncake_conversation.jsonl", limit=1500)
    result = replay("conversation", rows, capacity)
    assert abs(result.hit_rate - result.ideal_tokens) < 0.01 and result.hit_rate > 0.01


@needs_data
def test_azure_lengths() -> None:
    assert azure_lengths(DATA / "trace_azure_llm_2023_conv.csv", 1) == [(374, 44)]


def test_a_large_index_is_small_and_quick() -> None:
    result = measure_index(num_blocks=50_000, repeats=10)
    assert result.find_ms < 5 and result.bytes_per_block < 400
    assert result.findable_blocks == 49_152


def test_64_mixed_sequences_waste_under_four_percent() -> None:
    result = measure_waste("mixed", mixed_lengths(128))
    assert result.steps_measured > 100
    assert result.lowest >= 0.96 > 0.5 > result.static_longest


def test_static_batches_by_hand() -> None:
    # Rectangle 2 x (4 + 2) for two steps; used 4+1, 4+2 and 2+1.
    assert static_batches([(4, 2), (2, 1)], num_seqs=2) == (5 + 6 + 3) / 24


def test_command_writes_json_and_asks_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "waste.json"
    assert main(["waste", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["results"][0]["mean"] >= 0.96 and "policy waste" in report["command"]
    for data in ([], ["--data", str(tmp_path)]):
        with pytest.raises(SystemExit) as stopped:
            main(["replay", *data])
        assert stopped.value.code == 2
    assert "--data DIR" in capsys.readouterr().err


def test_policy_benches_do_not_load_torch() -> None:
    code = "import sys, kvboost.bench.policy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
