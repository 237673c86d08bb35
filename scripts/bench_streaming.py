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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

GIB = 1 << 30
CONTEXT = 4096

SHAPE = {
    "vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "rope_theta": 1e6, "max_position_embeddings": 32_768,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


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
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        while not self._stop.wait(0.005):
            require(self._nvml.nvmlDeviceGetMemoryInfo(self._handle, memory))
            self.bytes = max(self.bytes, memory[2] - self._ballast)

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


def loader(place: Any, device: str = "cuda") -> Any:
    """The model, its parameters where `place` says; with random values where there is memory."""
    import torch
    from transformers import Qwen2Config

    from kvboost.weights.packing import Packing, Scheme
    from kvboost.weights.replace import linears, put_packed
    from kvboost.weights.skeleton import build_skeleton

    model = build_skeleton(Qwen2Config(**SHAPE), torch.float16, torch.device(device))
    patterns: dict[Packing, torch.Tensor] = {}
    packed = set()
    for name, linear in list(linears(model)):
        if ".layers." not in name:
            continue
        n, k = linear.weight.shape
        packing = Packing(Scheme.ZEROS, 4, k, 128)
        weight = place(f"{name}.weight", (n, packing.row_bytes), torch.uint8)
        if not weight.is_meta:
            if packing not in patterns:
                codes = torch.randint(0, 16, (256, k), dtype=torch.uint8)
                scales = torch.full((256, packing.groups), 0.2 / k**0.5, dtype=torch.float16)
                patterns[packing] = packing.pack(codes, scales, torch.full((256, packing.groups), 8, dtype=torch.uint8))
            weight.view(-1, 256, packing.row_bytes).copy_(patterns[packing])
        put_packed(model, [f"{name}.weight"], weight, packing, torch.float16)
        packed.add(f"{name}.weight")
    for name, parameter in list(model.named_parameters()):
        if name in packed:
            continue
        value = place(name, tuple(parameter.shape), parameter.dtype)
        if not value.is_meta:
            value.fill_(1.0) if "norm" in name else value.zero_() if name.endswith("bias") else value.normal_(0, 0.02)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    return model


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


def measure(model: Any, link: float) -> list[dict[str, Any]]:
    from kvboost import KVBoost
    from kvboost.weights.streamer import streamer_of

    rng = random.Random(0)
    streamer = streamer_of(model)
    assert streamer is not None
    rows: list[dict[str, Any]] = []
    with KVBoost.from_model(model, max_model_len=CONTEXT) as kv:

        def run(context: int, batch: int, tokens: int) -> list[Any]:
            prompts = [[rng.randrange(10, SHAPE["vocab_size"]) for _ in range(context)] for _ in range(batch)]
            return list(kv.generate(prompts, max_new_tokens=tokens, temperature=0, ignore_eos=True))

        for context, batch in ((64, 1), (CONTEXT - 40, 1), (64, 32)):
            run(context, batch, 4)  # plain, then captured
            tpot = statistics.median(r.tpot_ms for r in run(context, batch, 32)) / 1e3
            rate = streamer.plan.sweep_bytes / tpot
            rows.append({"case": f"decode, context {context}, {batch} sequences", "tokens_per_s": batch / tpot,
                         "link_gb_per_s": rate / 1e9, "of_link": rate / link})  # fmt: skip
        times = [run(1000, 1, 1)[0].ttft_ms for _ in range(4)][1:]
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

    from kvboost.config import EngineConfig
    from kvboost.weights.store import measure_bus
    from kvboost.weights.streamer import streamer_of
    from kvboost.weights.streaming import load_in_parts

    device = torch.device("cuda", 0)
    bus = measure_bus(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, free / total))
    budget = (free - GIB // 10) / GIB
    print(
        f"{torch.cuda.get_device_name()}, {options.card_gib} GiB of it, {free / GIB:.2f} GiB free; bus {bus / 1e9:.1f} GB/s"
    )
    pace = Pace(bus)
    began = time.perf_counter()
    config = EngineConfig(vram_budget_gib=budget, max_model_len=CONTEXT)
    model = load_in_parts(loader, lambda parts: "random weights", config, device)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - began
    streamer = streamer_of(model)
    if streamer is None:
        sys.exit("the model fits: nothing is streamed. Lower --card-gib.")
    print(streamer.plan.describe(), f"loaded in {load_s:.1f} s", sep="\n")
    report: dict[str, Any] = {"card_gib": options.card_gib, "bus_gb_per_s": bus / 1e9, "load_s": load_s,
                              "plan": streamer.plan.describe(), "links": {}}  # fmt: skip
    for speed in (None, *options.pace):
        pace.bytes_per_s = None if speed is None else speed * 1e9
        link = bus if speed is None else speed * 1e9
        report["links"][f"{link / 1e9:.1f} GB/s"] = rows = measure(model, link)
        print(f"link of {link / 1e9:.1f} GB/s")
        for row in rows:
            print("   ", ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    report["peak_gib"] = peak.end() / GIB
    print(f"peak {report['peak_gib']:.3f} GiB (NVML, without the ballast)")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["peak_gib"] > options.card_gib:
        sys.exit("the peak is above the card's memory")


if __name__ == "__main__":
    main()
