"""The Triton kernels compile for GPUs that are not there: what the interpreter accepts, the compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "triton_compile.py"


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    cache = tmp_path / "-".join(arguments)  # of its own, or nothing is compiled
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def compiled(tmp_path: Path, *arguments: str) -> str:
    return finished(started(tmp_path, *arguments))


def test_for_an_h100(tmp_path: Path) -> None:
    """Prompts use Hopper's matrix instructions, decoding those of one warp; both load asynchronously."""
    lines = [line for line in compiled(tmp_path, "90").splitlines() if "attention_kernel" in line]
    assert len(lines) == 8
    for line in lines:
        words = line.split()
        wgmma, mma, loads = (int(words[words.index(name) + 1]) for name in ("wgmma", "mma", "cp.async"))
        assert wgmma + mma and loads, line
    assert any(" wgmma   0" not in line for line in lines)


def test_packed_weights_for_an_h100(tmp_path: Path) -> None:
    """Codes reach matrix instructions through registers, and are loaded asynchronously, 16 bytes at a time."""
    lines = [line.split() for line in compiled(tmp_path, "90", "--packed").splitlines() if "packed_kernel" in line]
    assert len(lines) == 4
    for words in lines:
        wgmma, mma, loads, stack = (int(words[words.index(name) + 1]) for name in ("wgmma", "mma", "cp.async", "stack"))
        assert wgmma + mma and loads >= 8 and stack == 0, words


def test_experts_for_an_h100(tmp_path: Path) -> None:
    """Weights are loaded asynchronously, 16 bytes at a time, and tiles meet them in Hopper's matrix instructions."""
    lines = [line.split() for line in compiled(tmp_path, "90", "--experts").splitlines() if "_kernel" in line]
    assert len(lines) == 2 + 3 * 4 + 4
    for words in lines:
        wgmma, loads, stack = (int(words[words.index(name) + 1]) for name in ("wgmma", "cp.async", "stack"))
        assert stack == 0, words
        assert loads >= 8 or words[0] in ("sort_kernel", "combine_kernel", "_route_kernel"), words
        assert wgmma or words[0] != "tile_kernel", words


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_shapes(tmp_path: Path) -> None:
    """For an A100 and an H100, side by side: each takes a minute or two of one core."""
    for process in [started(tmp_path, capability, "--all") for capability in ("80", "90")]:
        finished(process)
