#!/usr/bin/env python3
"""A 32B model on an 8 GiB card, emulated on a larger one: tokens per second, first token, share of the link.

    python scripts/bench_streaming.py [--card-gib 8] [--pace 25 12] [--json FILE]

Shape of Qwen2.5-32B, random int4 weights in groups of 128 (they cost what trained ones cost). A plain allocation takes
the GPU's memory but for `--card-gib` before torch starts, and NVML is asked for the peak. `--pace` also slows every copy
down to so many GB/s. The compute of the GPU is not slowed down: on a real small card prompts take longer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import threading
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

GIB = 1 << 30
CONTEXT = 4096
STEP_TOKENS = 512
"""Of a long prompt in one sweep. With more there is less memory for layers that stay."""
DRIVER_GIB = 0.32
"""For kernels and graphs, which the driver loads as they are first used."""
SHAPE = "qwen2.5-32b"
TOKENS = 9
"""In a measured answer: whole sweeps at one speed, so few are enough."""
MANY_CONTEXT = 15
"""Of each of 32 sequences: all prompts are one step, so that no prompt is computed in the sweeps that are measured."""


class Ballast:
    """Takes all of the GPU but `left_bytes`, through the driver, before torch counts anything."""

    def __init__(self, left_bytes: int) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        context, pointer, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
        for status in (
            cuda.cuInit(0),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            cuda.cuCtxSetCurrent(context),
            cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        ):
            require(status)
        self.bytes = max(0, total.value - left_bytes)
        if self.bytes:
            require(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(self.bytes)))


def require(status: int) -> None:
    if status:
        sys.exit(f"CUDA or NVML error {status}")


class Peak:
    """The largest use of the GPU that NVML reports, looked at every 5 ms, less the ballast."""

    def __init__(self, ballast: int) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        require(self._nvml.nvmlInit_v2())
        require(self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)))
        self._ballast, self.bytes, self._stop = ballast, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        memory = (ctypes.c_ulonglong * 5)()  # version, total, reserved by the system, free, used
        while not self._stop.wait(0.005):
            memory[0] = ctypes.sizeof(memory) | 2 << 24
            require(self._nvml.nvmlDeviceGetMemoryInfo_v2(self._handle, memory))
            self.bytes = max(self.bytes, memory[4] - self._ballast)

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


class Pace:
    """Slows the copies of a `CopyFeed` down to `bytes_per_s` by letting the copying stream sleep after each."""

    bytes_per_s: float | None = None

    def __init__(self, bus_bytes_per_s: float) -> None:
        import torch

        from kvboost.weights.gpu_feeds import CopyFeed

        torch.cuda._sleep(10**7)
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(10**9)
        torch.cuda.synchronize()
        cycles_per_s = 10**9 / (time.perf_counter() - began)
        own = CopyFeed._copy

        def copy(feed: CopyFeed, target: Any, source: Any) -> None:
            own(feed, target, source)
            if self.bytes_per_s is not None:
                seconds = target.nbytes * (1 / self.bytes_per_s - 1 / bus_bytes_per_s)
                torch.cuda._sleep(max(0, int(seconds * cycles_per_s)))

        CopyFeed._copy = copy  # type: ignore[method-assign]


def measure(model: Any, link: float, full: bool) -> list[dict[str, Any]]:
    """full: with a long context, too."""
    from kvboost import KVBoost
    from kvboost.bench.shapes import SHAPES
    from kvboost.weights.streamer import streamer_of

    rng = random.Random(0)
    streamer = streamer_of(model)
    assert streamer is not None
    rows: list[dict[str, Any]] = []
    with KVBoost.from_model(model, max_model_len=CONTEXT, max_num_batched_tokens=STEP_TOKENS) as kv:

        def run(context: int, batch: int, tokens: int) -> list[Any]:
            prompts = [[rng.randrange(10, SHAPES[SHAPE]["vocab_size"]) for _ in range(context)] for _ in range(batch)]
            return list(kv.generate(prompts, max_new_tokens=tokens, temperature=0, ignore_eos=True))

        for context, batch in ((64, 1), (MANY_CONTEXT, 32), (CONTEXT - 40, 1))[: 3 if full else 2]:
            run(context, batch, 4)  # plain, then captured
            tpot = statistics.median(r.tpot_ms for r in run(context, batch, TOKENS)) / 1e3
            rate = streamer.plan.sweep_bytes / tpot
            rows.append({"case": f"decode, context {context}, {batch} sequences", "tokens_per_s": batch / tpot,
                         "link_gb_per_s": rate / 1e9, "of_link": rate / link})  # fmt: skip
        times = [run(1000, 1, 1)[0].ttft_ms for _ in range(3)][1:]
        rows.append({"case": "first token, 1,000 new tokens", "ms": statistics.median(times)})
        rows.append({"case": "KV", "tokens": kv.stats().blocks_total * kv.built.layout.block_size})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card-gib", type=float, default=8.0)
    parser.add_argument("--pace", type=float, nargs="*", default=[25.0, 12.0], metavar="GB/S")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ballast = Ballast(int(options.card_gib * GIB))
    peak = Peak(ballast.bytes)

    import torch

    from kvboost.bench.packed_model import packed_model
    from kvboost.config import EngineConfig
    from kvboost.weights.store import measure_bus
    from kvboost.weights.streamer import streamer_of
    from kvboost.weights.streaming import load_in_parts

    device = torch.device("cuda", 0)
    bus = measure_bus(device)
    torch.cuda.empty_cache()
    pace = Pace(bus)
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, free / total))
    budget = free / GIB - DRIVER_GIB
    print(
        f"{torch.cuda.get_device_name()}, {options.card_gib} GiB of it, {free / GIB:.2f} GiB free; bus {bus / 1e9:.1f} GB/s"
    )
    began = time.perf_counter()
    config = EngineConfig(vram_budget_gib=budget, max_model_len=CONTEXT, max_num_batched_tokens=STEP_TOKENS)
    model = load_in_parts(partial(packed_model, SHAPE), lambda parts: "random weights", config, device)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - began
    streamer = streamer_of(model)
    if streamer is None:
        sys.exit("the model fits: nothing is streamed. Lower --card-gib.")
    print(streamer.plan.describe(), f"loaded in {load_s:.1f} s", sep="\n")
    report: dict[str, Any] = {"shape": SHAPE, "weights": "random int4, groups of 128", "date": date.today().isoformat(),
                              "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "command": " ".join(["python", *sys.argv]), "card_gib": options.card_gib, "bus_gb_per_s": bus / 1e9, "load_s": load_s,
                              "plan": streamer.plan.describe(), "links": {}}  # fmt: skip
    for speed in (None, *options.pace):
        pace.bytes_per_s = None if speed is None else speed * 1e9
        link = bus if speed is None else speed * 1e9
        report["links"][f"{link / 1e9:.1f} GB/s"] = rows = measure(model, link, speed is None)
        print(f"link of {link / 1e9:.1f} GB/s")
        for row in rows:
            print("   ", ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        report["peak_gib"] = peak.bytes / GIB
        print(f"peak so far {report['peak_gib']:.3f} GiB (NVML, without the ballast)", flush=True)
        if options.json:  # after each link: what comes later may be cut off
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if peak.end() / GIB > options.card_gib:
        sys.exit("the peak is above the card's memory")


if __name__ == "__main__":
    main()
