"""The machine under a measurement: what it is, how fast it could be, and who else used it meanwhile."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from kvboost.bench.engines.base import synchronize

NOISY_CORES = 0.15
"""More CPU than this used by other processes makes a measurement doubtful."""

READ_BYTES = 256 * 2**20
"""Well above any last-level cache."""

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}

BEST_OF = 5

PACKAGES = ("kvboost", "torch", "transformers")


@dataclass(frozen=True)
class Limits:
    """What the device can do at most, measured: bytes read and floating-point operations per second."""

    read_bytes_per_s: float
    flops_per_s: float


class OtherCpu:
    """A context that measures the CPU other processes use, in cores. `cores` is None where /proc/stat is missing."""

    cores: float | None = None
    seconds: float = 0.0

    def __enter__(self) -> OtherCpu:
        self._start = time.perf_counter(), _busy_seconds(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        start, busy_before, own_before = self._start
        self.seconds = time.perf_counter() - start
        busy = _busy_seconds()
        if busy is not None and busy_before is not None and self.seconds > 0:
            own = time.process_time() - own_before
            self.cores = max(0.0, busy - busy_before - own) / self.seconds


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            import kvboost

            found[package] = kvboost.__version__ if package == "kvboost" else "not installed"
    return found


def hardware(device: torch.device) -> dict[str, str]:
    facts = {
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "os": platform.platform(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return facts


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """A sum over a large tensor and one large matrix product in the model's dtype, best of a few."""
    large = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    read_s = _best_s(device, lambda: large.sum())
    size = MATMUL_SIZE.get(device.type, 1024)
    a = torch.rand(size, size, device=device).to(dtype)
    product_s = _best_s(device, lambda: a @ a)
    return Limits(READ_BYTES / read_s, 2 * size**3 / product_s)


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(BEST_OF):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            best = min(best, time.perf_counter() - start)
    return best


def _busy_seconds() -> float | None:
    """CPU seconds that were not idle since boot, all cores, stolen time included (proc(5), /proc/stat)."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    idle, io_wait = fields[3], fields[4]
    return (sum(fields[:8]) - idle - io_wait) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
