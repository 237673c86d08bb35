#!/usr/bin/env python3
"""Times the Triton kernels on this GPU, at the shape of Qwen2.5-7B, beside the measured bandwidth of its memory.

    python scripts/bench_kernels.py [attention prompt elementwise linear packed] [--tune]

Every figure is the median of replays of a CUDA graph that holds the call many times over different memory, more than
the L2 cache holds; so neither launch gaps nor the cache are measured. GB/s count each needed byte once. `--tune` tries
tiles instead and prints the best of each shape. A table is printed last; with OUT set, kernels.json is written there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import triton.testing

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kvboost.attention.paged_torch import Span
from kvboost.attention.step_tensors import StepInputs, StepTensors
from kvboost.cache.layout import LayerShape, SlabLayout
from kvboost.cache.pool import KVPool
from kvboost.kernels.cuda.packed_few import serves as served_by_cuda
from kvboost.kernels.triton.attention import Tile, paged_attention
from kvboost.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from kvboost.kernels.triton.packed import look_up, packed_many_rows, packed_product, unpack
from kvboost.kernels.triton.packed_linear import PackedTile, packed_few_rows
from kvboost.kernels.triton.packed_linear import chosen_tile as chosen_packed_tile
from kvboost.kernels.triton.rotary import rotary_write
from kvboost.kernels.triton.skinny import SkinnyTile, chosen_tile, skinny_linear
from kvboost.kernels.triton.write import write_slots
from kvboost.weights.packing import Packing, Scheme

Q_HEADS, KV_HEADS, DIM, HIDDEN, INNER = 28, 4, 128, 3584, 18944
ROTATED_BYTES = 256 * 2**20
"""Memory that the calls of one graph touch, at least: four times the L2 cache of an H200."""
MAX_CALLS = 200
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
T = TypeVar("T")

DECODE = [(1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (32, 8192)]
PROMPTS = [(64, 1024), (64, 8192), (64, 32768), (1024, 0), (8192, 0), (1024, 7168)]
WEIGHTS = {"o 3584x3584": (3584, 3584), "qkv 4608x3584": (4608, 3584), "gate-up 37888x3584": (37888, 3584),
           "down 3584x18944": (3584, 18944), "head 152064x3584": (152064, 3584)}  # fmt: skip

PACKED = {"32B qkv": (7168, 5120), "32B o": (5120, 5120), "32B gate-up": (55_296, 5120), "32B down": (5120, 27_648),
          "7B qkv": (4608, 3584), "7B o": (3584, 3584), "7B gate-up": (37_888, 3584), "7B down": (3584, 18_944)}  # fmt: skip
FILES = {"Q4_0": (Scheme.SYMMETRIC, 4, 32), "Q4_K": (Scheme.TWO_LEVEL, 4, 32), "Q5_K": (Scheme.TWO_LEVEL, 5, 32),
         "Q6_K": (Scheme.TWO_LEVEL_SIGNED, 6, 16), "Q8_0": (Scheme.SYMMETRIC, 8, 32), "fp8": (Scheme.FLOAT8, 8, 128)}  # fmt: skip
"""Scheme, bits and group of other formats, timed at one shape."""
PACKED_TILES = {
    8: [(32, 128, 1, 5), (32, 256, 1, 3), (32, 256, 1, 5), (32, 512, 1, 2), (32, 512, 1, 3), (32, 1024, 1, 2),
        (64, 128, 2, 4), (64, 256, 2, 3), (64, 256, 2, 4), (64, 512, 2, 2), (64, 512, 2, 3), (128, 256, 4, 3),
        (128, 512, 4, 2)],
    16: [(32, 256, 1, 3), (32, 256, 1, 4), (32, 512, 1, 2), (64, 128, 2, 4), (64, 256, 2, 3), (64, 512, 2, 2),
         (128, 256, 4, 3), (128, 512, 4, 2)],
    32: [(64, 128, 2, 4), (64, 256, 2, 3), (64, 256, 4, 3), (128, 128, 4, 3), (128, 256, 4, 3), (128, 256, 8, 3)],
    64: [(64, 128, 4, 3), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 256, 4, 2), (128, 128, 8, 3),
         (128, 256, 8, 3)],
}  # fmt: skip
"""Weight rows, weights of a row, warps and stages to try, by padded rows of x."""


@dataclass
class Row:
    name: str
    us: float
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    of_copy: float | None = None
    note: str = ""


class Bench:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.copy_gb_per_s = self.measure_copy()

    def measure_copy(self) -> float:
        """Not in a graph: there a copy engine copies, at two thirds of the speed of a kernel."""
        source = torch.randn(2**30, device=DEVICE).view(torch.uint8)  # 4 GiB
        target = torch.empty_like(source)
        us = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") * 1e3
        self.rows.append(Row("copy of 4 GiB", us, 2 * source.nbytes / us / 1e3, note="bytes read and written"))
        return 2 * source.nbytes / us / 1e3

    def add(self, name: str, us: float, num_bytes: float = 0, flops: float = 0, note: str = "") -> None:
        gb = num_bytes / us / 1e3 if num_bytes else None
        share = gb / self.copy_gb_per_s if gb else None
        self.rows.append(Row(name, us, gb, flops / us / 1e6 if flops else None, share, note))
        print(format_row(self.rows[-1]), flush=True)


def time_us(call: Callable[[int], Any], count: int, reps_ms: int = 40) -> float:
    """Median time of `call(i)` in microseconds; a graph holds it for i in range(count)."""
    call(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    ms = triton.testing.do_bench(graph.replay, warmup=10, rep=reps_ms, return_mode="median")
    return float(ms) * 1e3 / count


def copies(num_bytes: int) -> int:
    """How often memory of one call must differ."""
    return max(1, min(MAX_CALLS, -(-ROTATED_BYTES // num_bytes)))


class Context:
    """A pool of as many layers as rotation needs, and the inputs of one step over it."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        keys = sum(start + count for start, count in spans)
        self.count = copies(keys * KV_HEADS * DIM * 2 * 2)
        layout = SlabLayout((LayerShape(KV_HEADS, DIM, KV_HEADS, DIM),) * self.count, 16, "bfloat16", 2)
        blocks = [-(-(start + count) // 16) for start, count in spans]
        self.pool = KVPool(layout, sum(blocks) + 1, DTYPE, DEVICE)
        self.pool.slabs.normal_()
        order = torch.randperm(sum(blocks)).tolist()
        made = [Span(s, c, [order.pop() for _ in range(n)]) for (s, c), n in zip(spans, blocks, strict=True)]
        tokens = sum(count for _, count in spans)
        self.tensors = StepTensors(tokens, len(spans), sum(blocks), 16, DEVICE)
        self.inputs: StepInputs = self.tensors.fill(made)
        self.query = torch.randn(tokens, Q_HEADS, DIM, dtype=DTYPE, device=DEVICE)

    def attend(self, i: int, **options: Any) -> torch.Tensor:
        return paged_attention(self.query, self.pool.keys[i], self.pool.values[i], self.inputs.batch, **options)


def needed(spans: list[tuple[int, int]]) -> tuple[int, int]:
    """Bytes (keys, values, queries and outputs once) and multiply-add operations of attention."""
    keys = sum(start + count for start, count in spans)
    rows = sum(count for _, count in spans)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in spans)
    return keys * KV_HEADS * DIM * 2 * 2 + 2 * rows * Q_HEADS * DIM * 2, 4 * pairs * Q_HEADS * DIM


def bench_attention(bench: Bench, tune: bool) -> None:
    tiles = [Tile(16, n, w, s) for n, w, s in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7)) if n * s <= 384]
    for batch, length in DECODE:
        spans = [(length - 1, 1)] * batch
        context = Context(spans)
        num_bytes, flops = needed(spans)
        name = f"decode {batch} x {length}"
        if not tune:
            bench.add(name, time_us(context.attend, context.count), num_bytes, flops)
            continue
        for tile in tiles:
            for splits in {max(1, min(64, p * 132 // (batch * KV_HEADS))) for p in (1, 2, 4, 8)}:
                options = {"tile": tile, "splits": splits}
                try_one(bench, f"{name} {tile} splits={splits}", context, options, num_bytes, flops)


def bench_prompt(bench: Bench, tune: bool) -> None:
    tiles = [Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 4), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3),
             Tile(128, 64, 8, 4), Tile(128, 32, 8, 4), Tile(128, 128, 8, 2), Tile(64, 128, 4, 2), Tile(64, 128, 8, 3)]  # fmt: skip
    for new, cached in PROMPTS:
        spans = [(cached, new)]
        context = Context(spans)
        num_bytes, flops = needed(spans)
        name = f"prompt {new} on {cached}"
        count = min(context.count, 20)
        if tune:
            for tile, splits in itertools.product(tiles, (1, 2, 4, 8, 16) if new < 1000 else (1, 2)):
                options = {"tile": tile, "splits": splits}
                try_one(bench, f"{name} {tile} splits={splits}", context, options, num_bytes, flops)
            continue
        bench.add(name, time_us(context.attend, count), num_bytes, flops)
        if cached == 0:
            q = context.query.transpose(0, 1)[None]
            k, v = (torch.randn(1, KV_HEADS, new, DIM, dtype=DTYPE, device=DEVICE) for _ in range(2))
            us = time_us(
                lambda i, q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 10
            )
            bench.add(f"  torch's fused attention, {new}", us, num_bytes, flops)


def try_one(bench: Bench, name: str, context: Context, options: dict[str, Any], num_bytes: int, flops: int) -> None:
    """A tile that does not fit in shared memory is passed over, with its reason."""
    try:
        us = time_us(lambda i: context.attend(i, **options), min(context.count, 20), 15)
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:80]}")
        return
    bench.add(name, us, num_bytes, flops)


def bench_elementwise(bench: Bench, tune: bool) -> None:
    weight = torch.randn(HIDDEN, dtype=DTYPE, device=DEVICE)
    for rows in (1, 64, 256, 2048):
        one = rows * HIDDEN * 2
        count = copies(one * 4)
        x = torch.randn(count, rows, HIDDEN, dtype=DTYPE, device=DEVICE)
        residual = torch.randn_like(x)
        bench.add(f"rms_norm {rows}", time_us(lambda i, x=x: rms_norm(x[i], weight, 1e-6), count), 2 * one)
        call = lambda i, x=x, r=residual: add_rms_norm(x[i], r[i], weight, 1e-6)  # noqa: E731
        bench.add(f"add_rms_norm {rows}", time_us(call, count), 4 * one)
        gate_up = torch.randn(copies(rows * INNER * 6), rows, 2 * INNER, dtype=DTYPE, device=DEVICE)
        us = time_us(lambda i, g=gate_up: act_mul(g[i], "silu"), len(gate_up))
        bench.add(f"act_mul {rows}", us, rows * INNER * 6)
        bench_write(bench, rows)


def bench_write(bench: Bench, rows: int) -> None:
    context = Context([(0, rows)])
    width = (Q_HEADS + 2 * KV_HEADS) * DIM
    qkv = torch.randn(copies(rows * width * 2), rows, width, dtype=DTYPE, device=DEVICE)
    parts = [
        [p.unflatten(1, (-1, DIM)) for p in one.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)]
        for one in qkv
    ]
    cos, sin = (torch.randn(rows, DIM, dtype=DTYPE, device=DEVICE) for _ in range(2))
    slots, layers = context.inputs.slots, context.count
    keys, values = context.pool.keys, context.pool.values

    def rotate(i: int) -> None:
        rotary_write(*parts[i], cos, sin, keys[i % layers], values[i % layers], slots)

    def write(i: int) -> None:
        write_slots(parts[i][1], parts[i][2], keys[i % layers], values[i % layers], slots)

    stored = rows * 2 * KV_HEADS * DIM * 2
    bench.add(f"rotary_write {rows}", time_us(rotate, len(qkv)), 2 * rows * (Q_HEADS + KV_HEADS) * DIM * 2 + 2 * stored)
    bench.add(f"write_slots {rows}", time_us(write, len(qkv)), 2 * stored)


def bench_linear(bench: Bench, tune: bool) -> None:
    for name, (n, k) in WEIGHTS.items():
        count = copies(n * k * 2)
        weights = torch.randn(count, n, k, dtype=DTYPE, device=DEVICE)
        for rows in (1, 16, 32, 64) if tune else (1, 2, 4, 8, 16, 32, 64):
            x = torch.randn(rows, k, dtype=DTYPE, device=DEVICE)
            num_bytes = n * k * 2
            us = time_us(lambda i, x=x, w=weights: F.linear(x, w[i]), count)
            bench.add(f"{name} rows {rows} cuBLAS", us, num_bytes)
            if tune:
                tune_linear(bench, f"{name} rows {rows}", x, weights)
            else:
                us = time_us(lambda i, x=x, w=weights: skinny_linear(x, w[i]), count)
                bench.add(f"{name} rows {rows} skinny", us, num_bytes, note=str(chosen_tile(n, k, DEVICE)))
        del weights


def fastest(
    name: str, tiles: Iterable[T], run: Callable[[T], Callable[[int], object]], count: int, reps_ms: int
) -> tuple[float, T] | None:
    """Microseconds and tile of the best; None when no tile could run. `run(tile)(i)` computes with the i-th weight."""
    best: tuple[float, T] | None = None
    for tile in tiles:
        try:
            us = time_us(run(tile), count, reps_ms)
        except Exception as error:
            print(f"{name} {tile}: {type(error).__name__} {str(error)[:80]}")
            continue
        if best is None or us < best[0]:
            best = us, tile
    return best


def tune_linear(bench: Bench, name: str, x: torch.Tensor, weights: torch.Tensor) -> None:
    count, n, k = weights.shape
    shapes = [(32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4),
              (64, 256, 4, 3), (64, 256, 8, 3), (128, 64, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3), (16, 256, 4, 4)]  # fmt: skip
    tiles = []
    for (block_n, block_k, warps, stages), splits in itertools.product(shapes, (1, 2, 4, 8, 16)):
        programs = -(-n // block_n) * splits
        if programs >= 100 and (splits == 1 or programs <= 132 * 32):
            tiles.append(SkinnyTile(block_n, block_k, splits, warps, stages))
    best = fastest(name, tiles, lambda t: lambda i: skinny_linear(x, weights[i], tile=t), count, 8)
    if best is not None:
        bench.add(f"{name} best skinny", best[0], n * k * 2, note=f"({n}, {k}): {best[1]},")


def random_packed(packing: Packing, n: int) -> torch.Tensor:
    """uint8 `[copies, n, row_bytes]` of random codes; what lies behind them is small, so that no sum overflows."""
    weights = torch.randint(
        0, 256, (copies(n * packing.row_bytes), n, packing.row_bytes), dtype=torch.uint8, device=DEVICE
    )
    weights[..., packing.scales_at :] &= 0x1F
    return weights


def bench_packed(bench: Bench, tune: bool) -> None:
    for name, (n, k) in PACKED.items():
        packing = Packing(Scheme.ZEROS, 4, k, 128)
        weights = random_packed(packing, n)
        dense = torch.randn(copies(n * k * 2), n, k, dtype=DTYPE, device=DEVICE)
        for rows in (1, 16, 32, 64) if tune else (1, 4, 16, 32, 64):
            x = torch.randn(rows, k, dtype=DTYPE, device=DEVICE)
            label = f"{name} {n}x{k} rows {rows}"
            us = time_us(lambda i, x=x, w=dense: F.linear(x, w[i]), len(dense), 15)
            bench.add(f"{label} bf16 cuBLAS", us, n * k * 2)
            if tune:
                tune_packed(bench, label, x, weights, packing)
            else:
                us = time_us(lambda i, x=x, w=weights, p=packing: packed_product(x, w[i], p), len(weights), 15)
                by = (
                    "CUDA C++"
                    if served_by_cuda(x, weights[0], packing)
                    else chosen_packed_tile(packing, n, rows, DEVICE)
                )
                bench.add(f"{label} int4", us, n * packing.row_bytes, note=str(by))
        del weights, dense
    if not tune:
        bench_formats(bench)
        bench_unpacking(bench)


def bench_formats(bench: Bench) -> None:
    n, k = 37_888, 3584
    for name, (scheme, bits, group) in FILES.items():
        packing = Packing(scheme, bits, k, group)
        weights = random_packed(packing, n)
        for rows in (1, 16):
            x = torch.randn(rows, k, dtype=DTYPE, device=DEVICE)
            us = time_us(lambda i, x=x, w=weights, p=packing: packed_product(x, w[i], p), len(weights), 15)
            bench.add(f"7B gate-up {name} rows {rows}", us, n * packing.row_bytes)
        del weights


def bench_unpacking(bench: Bench) -> None:
    """From how many rows on unpacking pays: `FUSED_ROWS` of kernels/triton/packed.py; and an embedding of 32B."""
    n, k = PACKED["32B gate-up"]
    packing = Packing(Scheme.ZEROS, 4, k, 128)
    weights = random_packed(packing, n)
    for rows in (64, 128, 256, 512):
        x = torch.randn(rows, k, dtype=DTYPE, device=DEVICE)
        for name, call in (("fused", packed_few_rows), ("unpacked", packed_many_rows)):
            us = time_us(lambda i, x=x, call=call: call(x, weights[i], packing), len(weights), 15)
            bench.add(f"32B gate-up rows {rows} {name}", us, n * packing.row_bytes, 2 * rows * n * k)
    piece = torch.empty(3276, k, dtype=DTYPE, device=DEVICE)
    us = time_us(lambda i: unpack(weights[i, : len(piece)], packing, piece), len(weights), 15)
    bench.add("unpack a piece of 3276 rows", us, piece.nbytes + len(piece) * packing.row_bytes)
    for tokens in (1, 64, 2048):
        index = torch.randint(0, n, (tokens,), device=DEVICE)
        us = time_us(lambda i, index=index: look_up(index, weights[i], packing, DTYPE), len(weights), 15)
        bench.add(f"look up {tokens} of {n} rows", us, tokens * (packing.row_bytes + 2 * k))


def tune_packed(bench: Bench, name: str, x: torch.Tensor, weights: torch.Tensor, packing: Packing) -> None:
    count, n, _ = weights.shape
    padded = max(8, len(x))
    tiles = []
    for (block_n, block_k, warps, stages), splits in itertools.product(PACKED_TILES[padded], (1, 2, 4, 8, 16)):
        programs = -(-n // block_n) * splits
        if programs >= 130 and (splits == 1 or programs <= 132 * 24):
            tiles.append(PackedTile(block_n, block_k, splits, warps, stages))
    best = fastest(name, tiles, lambda t: lambda i: packed_few_rows(x, weights[i], packing, tile=t), count, 5)
    if best is not None:
        note = f"({packing.bits}, {n}, {packing.k}, {padded}): {best[1]},"
        bench.add(f"{name} best packed", best[0], n * packing.row_bytes, note=note)


def format_row(row: Row) -> str:
    rate = f"{row.gb_per_s:7.0f} GB/s" if row.gb_per_s else " " * 12
    flops = f"{row.tflop_per_s:6.1f} TFLOP/s" if row.tflop_per_s else " " * 14
    share = f"{100 * row.of_copy:4.0f}%" if row.of_copy else "     "
    return f"{row.name:42} {row.us:9.2f} us {rate} {flops} {share} {row.note}".rstrip()


def best_of_each(rows: list[Row]) -> list[Row]:
    """The fastest three of every shape that was tuned; other rows as they are."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.name.split(" Tile(")[0], []).append(row)
    return [row for group in groups.values() for row in sorted(group, key=lambda r: r.us)[:3]]


SECTIONS = {
    "attention": bench_attention,
    "prompt": bench_prompt,
    "elementwise": bench_elementwise,
    "linear": bench_linear,
    "packed": bench_packed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"which of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--tune", action="store_true", help="try tiles, and print the best of each shape")
    arguments = parser.parse_args()
    sections = arguments.sections or list(SECTIONS)
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py needs a CUDA GPU.")
    torch.manual_seed(0)
    began = time.perf_counter()
    bench = Bench()
    for section in sections:
        SECTIONS[section](bench, arguments.tune)
        torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    print(f"\n{name}, torch {torch.__version__}, triton {triton.__version__}, {time.perf_counter() - began:.0f} s")
    for row in best_of_each(bench.rows) if arguments.tune else bench.rows:
        print(format_row(row))
    if os.environ.get("OUT"):
        result = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "tune": arguments.tune}
        rows = [asdict(row) for row in bench.rows]
        Path(os.environ["OUT"], "kernels.json").write_text(json.dumps({**result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
