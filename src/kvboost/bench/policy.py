"""Benches of policy alone: scheduler, block pool and prefix index without a model, a device or torch.

python -m kvboost.bench.policy index               look-ups and memory with a million blocks
python -m kvboost.bench.policy waste               share of allocated token slots that hold a token
python -m kvboost.bench.policy replay --data DIR   hit rate on the Mooncake traces
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvboost.cache.blocks import BlockPool
from kvboost.cache.prefix import extend_keys, root_key
from kvboost.engine.request import Request
from kvboost.engine.sampling_params import SamplingParams
from kvboost.engine.scheduler import Scheduler

TRACES = ("conversation", "synthetic")
TRACE_BLOCK = 512
"""Tokens per hash id in the Mooncake traces."""

ROOT = root_key(b"bench")
GREEDY = SamplingParams(temperature=0.0)


# -- index -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexResult:
    """Times are medians over `repeats`; bytes are of pool, index and keys together, with (nearly) every block findable: `bytes_per_block` as Python
    allocated them, `rss_bytes_per_block` as the process grew."""

    num_blocks: int
    findable_blocks: int
    block_size: int
    prompt_tokens: int
    repeats: int
    find_ms: float
    find_max_ms: float
    hash_ms: float
    bytes_per_block: float
    rss_bytes_per_block: float | None


def fill(pool: BlockPool, block_size: int, prompt_tokens: int) -> None:
    """Make the blocks of an empty pool findable, by key and as tails, by whole random prompts; the rest stays empty."""
    per_prompt = prompt_tokens // block_size
    for number in range(pool.num_blocks // per_prompt):
        keys: list[bytes] = []
        prompt = random_prompt(number, prompt_tokens)
        extend_keys(keys, ROOT, prompt, block_size)
        table = [pool.allocate() for _ in keys]
        for i, (block, key) in enumerate(zip(table, keys, strict=True)):
            pool.name(block, key)
            pool.note_tail(keys[i - 1] if i else ROOT, block, prompt[i * block_size : (i + 1) * block_size])
        pool.release(table)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids below 65,536."""
    return list(array("H", random.Random(seed).randbytes(2 * num_tokens)))


def measure_index(
    num_blocks: int = 1_000_000, block_size: int = 16, prompt_tokens: int = 32_768, repeats: int = 50
) -> IndexResult:
    """Look up prompts that are wholly known, each one far from the last in memory."""
    # Resident memory first: the allocator would reuse what a traced run had freed.
    gc.collect()
    before = resident_bytes()
    pool = BlockPool(num_blocks)
    fill(pool, block_size, prompt_tokens)
    gc.collect()
    after = resident_bytes()
    find_s, hash_s = [], []
    full_prompts = num_blocks // (prompt_tokens // block_size)
    for number in random.Random(0).choices(range(full_prompts), k=repeats):
        prompt, keys = random_prompt(number, prompt_tokens), list[bytes]()
        start = time.perf_counter()
        extend_keys(keys, ROOT, prompt, block_size)
        hashed = time.perf_counter()
        found = pool.find(keys, len(keys))
        find_s.append(time.perf_counter() - hashed)
        hash_s.append(hashed - start)
        if len(found) != prompt_tokens // block_size:
            raise AssertionError("a stored prompt was not found")
    findable = pool.num_cached
    del pool
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    fill(pool, block_size, prompt_tokens)
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return IndexResult(
        num_blocks, findable, block_size, prompt_tokens, repeats, statistics.median(find_s) * 1e3,
        max(find_s) * 1e3, statistics.median(hash_s) * 1e3, traced / num_blocks,
        None if before is None or after is None else (after - before) / num_blocks,
    )  # fmt: skip


def resident_bytes() -> int | None:
    """Resident memory of this process; None where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceRow:
    """One request of a Mooncake trace; equal ids mean equal tokens, in this block and all before it."""

    input_tokens: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ReplayResult:
    """Hit rates are shares of prompt tokens. `ideal_*` come from a separate few-line LRU over the trace's own ids:
    `ideal_blocks` counts ids (what papers report), `ideal_tokens` tokens, partly filled last blocks included."""

    trace: str
    capacity_tokens: int | None
    requests: int
    refused: int
    prompt_tokens: int
    hit_rate: float
    ideal_blocks: float
    ideal_tokens: float
    seconds: float


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows.append(TraceRow(row["input_length"], tuple(row["hash_ids"])))
            if len(rows) == limit:
                break
    return rows


def replay(name: str, rows: Sequence[TraceRow], capacity_tokens: int | None) -> ReplayResult:
    """Send the prompts one after another, in trace order, through a scheduler with blocks of 512 tokens.

    Every token of block `h` is the id `h`: prompts then share exactly the tokens they shared in the trace. Answers
    end at one token: the trace does not say what they were, only (through later prompts) how they were continued.
    """
    num_blocks = (capacity_tokens or TRACE_BLOCK * (sum(len(r.ids) for r in rows) + 1)) // TRACE_BLOCK
    scheduler = Scheduler(BlockPool(num_blocks), TRACE_BLOCK, max_num_seqs=1, max_num_batched_tokens=8192)
    refused, start = 0, time.perf_counter()
    for number, row in enumerate(rows):
        total = row.input_tokens + 1
        if scheduler.blocks_for(total) > scheduler.usable_blocks:
            refused += 1
            continue
        tokens = [i for i in row.ids for _ in range(TRACE_BLOCK)][: row.input_tokens]
        scheduler.add(
            Request(id=str(number), prompt_ids=tokens, params=GREEDY, root=ROOT, max_total_tokens=total)
        )  # fmt: skip
        run_to_end(scheduler)
    spent, counters = time.perf_counter() - start, scheduler.counters
    by_blocks, by_tokens = ideal_hit_rates(rows, None if capacity_tokens is None else num_blocks)
    return ReplayResult(
        name, capacity_tokens, len(rows), refused, counters.prompt_tokens,
        counters.prefix_hits / counters.prefix_queries, by_blocks, by_tokens, spent,
    )  # fmt: skip


def run_to_end(scheduler: Scheduler) -> None:
    for _ in steps(scheduler):
        pass


def steps(scheduler: Scheduler) -> Iterator[None]:
    """Run until nothing is left; every answer goes on to its request's `max_total_tokens`. Yields between steps."""
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan)
        for work in plan.work:
            if work.sample:
                scheduler.append_token(work.request, 0)
                if len(work.request.tokens) >= work.request.max_total_tokens:
                    scheduler.finish(work.request, "length")
        yield


def ideal_hit_rates(rows: Iterable[TraceRow], capacity: int | None) -> tuple[float, float]:
    """(share of ids, share of tokens) found by an LRU of `capacity` ids, a prompt's first id being its most recent."""
    lru: OrderedDict[int, None] = OrderedDict()
    ids = tokens = hit_ids = hit_tokens = 0
    for row in rows:
        run = next((n for n, i in enumerate(row.ids) if i not in lru), len(row.ids))
        ids, hit_ids = ids + len(row.ids), hit_ids + run
        tokens, hit_tokens = tokens + row.input_tokens, hit_tokens + min(run * TRACE_BLOCK, row.input_tokens)
        for i in reversed(row.ids):
            lru[i] = None
            lru.move_to_end(i)
        while capacity is not None and len(lru) > capacity:
            lru.popitem(last=False)
    return hit_ids / ids, hit_tokens / tokens


# -- waste -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WasteResult:
    """Shares of allocated token slots that hold a token, over the steps with all `num_seqs` sequences running.

    `static_longest`: one rectangle per sequence as long as the longest of the whole mix (prompt and answer), for the
    same sequences at the same moments. `static_batches`: batches in order of arrival, each padded to its own longest
    and kept until all of it has ended.
    """

    mix: str
    num_seqs: int
    block_size: int
    requests: int
    mean_tokens: float
    steps_measured: int
    mean: float
    lowest: float
    static_longest: float
    static_batches: float


def mixed_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, answer) tokens: prompts 32 to 2,048, evenly spread in the logarithm; answers 16 to 512."""
    rng = random.Random(seed)
    return [(round(32 * 64 ** rng.random()), rng.randint(16, 512)) for _ in range(count)]


def azure_lengths(path: Path, count: int) -> list[tuple[int, int]]:
    with path.open(encoding="utf-8") as lines:
        rows = [(int(r["ContextTokens"]), max(1, int(r["GeneratedTokens"]))) for r in csv.DictReader(lines)]
    return rows[:count]


def measure_waste(
    mix: str, lengths: Sequence[tuple[int, int]], num_seqs: int = 64, block_size: int = 16
) -> WasteResult:
    """All requests wait at the start, none shares a token with another, and there is memory for `num_seqs` of them."""
    longest = max(p + a for p, a in lengths)
    pool = BlockPool(num_seqs * -(-longest // block_size))
    scheduler = Scheduler(pool, block_size, num_seqs, max_num_batched_tokens=2048)
    for number, (prompt, answer) in enumerate(lengths):
        tokens = [number + 1] * prompt
        scheduler.add(
            Request(id=str(number), prompt_ids=tokens, params=GREEDY, root=ROOT, max_total_tokens=prompt + answer)
        )  # fmt: skip
    shares, used_slots = [], 0
    for _ in steps(scheduler):
        if len(scheduler.running) == num_seqs:
            allocated, used = scheduler.slots()
            shares.append(used / allocated)
            used_slots += used
    return WasteResult(
        mix, num_seqs, block_size, len(lengths), statistics.mean(p + a for p, a in lengths), len(shares),
        statistics.mean(shares), min(shares), used_slots / (len(shares) * num_seqs * longest),
        static_batches(lengths, num_seqs),
    )  # fmt: skip


def static_batches(lengths: Sequence[tuple[int, int]], num_seqs: int) -> float:
    """Token slots used, summed over decode steps, by slots allocated: `[batch, longest prompt + longest answer]`."""
    used = allocated = 0
    for first in range(0, len(lengths), num_seqs):
        batch = lengths[first : first + num_seqs]
        num_steps = max(answer for _, answer in batch)
        allocated += num_steps * len(batch) * (max(prompt for prompt, _ in batch) + num_steps)
        # A row that has ended needs none of its slots, yet keeps them.
        used += sum(answer * prompt + answer * (answer + 1) // 2 for prompt, answer in batch)
    return used / allocated


# -- command -----------------------------------------------------------------------------------------------------------


def run(bench: str, data: Path | None) -> list[Any]:
    """The results of one bench. Raises `FileNotFoundError` when it needs a trace that `data` does not have."""
    if bench == "index":
        return [measure_index()]
    if bench == "waste":
        results = [measure_waste("32-2048 + 16-512", mixed_lengths(1024))]
        if data is not None:
            lengths = azure_lengths(data / "trace_azure_llm_2023_conv.csv", 1024)
            results.append(measure_waste("Azure 2023 conversations", lengths))
        return results
    if data is None:
        raise FileNotFoundError("replay needs the Mooncake traces: give their folder with --data DIR")
    return [
        replay(name, rows, capacity)
        for name in TRACES
        for rows in [read_trace(data / f"trace_mooncake_{name}.jsonl")]
        for capacity in (None, 500_000, 5_000_000)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvboost.bench.policy", description="Benches without a model.")
    parser.add_argument("bench", choices=["index", "replay", "waste"])
    parser.add_argument(
        "--data", type=Path, help="folder with trace_mooncake_*.jsonl and trace_azure_llm_2023_conv.csv"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        results = run(options.bench, options.data)
    except FileNotFoundError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    about = {
        "command": " ".join([parser.prog, *given]),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    rows = [asdict(result) for result in results]
    for line in (about, *rows):
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in line.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
