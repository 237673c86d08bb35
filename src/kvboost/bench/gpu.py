"""`python -m kvboost.bench.gpu`: decode and first-token times of real model shapes on one GPU, through the public API.

Weights are random: they cost what trained ones cost. Transformers runs beside us in the same process, and the bandwidth
limit of decoding is measured and printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvboost
from kvboost import KVBoost
from kvboost.bench.engines.continuous import ContinuousBatchingEngine
from kvboost.bench.packed_model import packed_model
from kvboost.bench.shapes import SHAPES, config_of

GB = 1e9
DECODE = ((1024, 1), (1024, 16), (1024, 64), (1024, 256), (8192, 1), (8192, 32))
"""Tokens of context, and sequences."""
Row = dict[str, Any]


def build(shape: str, weights: str = "bf16", device: str = "cuda") -> PreTrainedModel:
    """A model of that shape with random weights: bf16, or 4 bits in groups of 128."""
    if weights == "int4":
        return packed_model(shape, device=device, dtype=torch.bfloat16).eval()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / best


def _seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


class Bench:
    """Measures one engine; prompts are random ids, so that nothing is found by chance."""

    def __init__(self, model: PreTrainedModel, bandwidth: float, cold: dict[int, float], **options: Any) -> None:
        self.model = model
        self.vocab = int(model.config.get_text_config().vocab_size)
        self.bandwidth = bandwidth
        self.rng = random.Random(0)
        self.transformers_cold = cold
        self.kv = KVBoost.from_model(model, **options)

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(10, self.vocab) for _ in range(count)]

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
        return self.kv.generate([list(p) for p in prompts], max_new_tokens=tokens, temperature=0, ignore_eos=True)

    def decode(self, context: int, batch: int, tokens: int = 64) -> Row:
        """Time per output token when all prompts' KV is there already; a row that says so where it does not fit."""
        stats = self.kv.stats()
        needed, there = batch * (context + tokens), stats.blocks_total * self.kv.built.layout.block_size
        if needed > there:
            return {"case": f"decode {context} x{batch}", "not_run": f"{needed} tokens of KV, {there} fit"}
        prompts = [self.ids(context) for _ in range(batch)]
        self.generate(prompts, 1)
        self.generate(prompts, 8)
        results = self.generate(prompts, tokens)
        tpot = float(statistics.median(r.tpot_ms for r in results))
        layout = self.kv.built.layout
        moved = weights_read(self.model, batch) + batch * (context + tokens / 2) * layout.bytes_per_token
        limit = moved / self.bandwidth * 1e3
        return {"case": f"decode {context} x{batch}", "tpot_ms": tpot, "limit_ms": limit, "of_limit": limit / tpot,
                "tokens_per_s": batch / tpot * 1e3}  # fmt: skip

    def first_token(self, context: int, new: int = 64, rounds: int = 5) -> Row:
        """Cold: nothing known. Warm: all but `new` tokens known, from earlier, different requests; the second and on."""
        cold, warm = [], []
        for _ in range(rounds):
            base = self.ids(context - new)
            cold.append(self._ttft(base + self.ids(new)))
            warm += [self._ttft(base + self.ids(new)) for _ in range(5)][1:]
        own = self.transformers_cold.get(context)
        row: Row = {
            "case": f"first token {context}",
            "cold_ms": statistics.median(cold),
            "warm_ms": statistics.median(warm),
        }
        return row if own is None else {**row, "transformers_cold_ms": own, "ratio": own / row["warm_ms"]}

    def _ttft(self, ids: list[int]) -> float:
        result = self.generate([ids], 1)[0]
        return float(result.ttft_ms)

    def throughput(self, shared: int, own: int, requests: int, tokens: int) -> Row:
        base = self.ids(shared)
        prompts = [base + self.ids(own) for _ in range(requests)]
        begin = time.perf_counter()
        self.generate(prompts, tokens)
        seconds = time.perf_counter() - begin
        return {"case": f"{requests} requests of {shared}+{own}+{tokens}", "output_tokens_per_s": requests * tokens / seconds,
                "seconds": seconds}  # fmt: skip


def weights_read(model: PreTrainedModel, batch: int) -> float:
    """Bytes of weights that a step of `batch` tokens reads; of experts, those that as many random choices touch."""
    head, config = model.get_output_embeddings().weight, model.config.get_text_config()
    total = float(head.nbytes - model.get_input_embeddings().weight.nbytes)  # of which a step reads a row
    for parameter in model.get_decoder().parameters():
        share = 1.0
        if parameter.dim() == 3:  # [experts, rows, columns]
            share -= (1 - config.num_experts_per_tok / parameter.shape[0]) ** batch
        total += share * parameter.nbytes
    return total


def transformers_cold(model: PreTrainedModel, contexts: Sequence[int]) -> dict[int, float]:
    """Milliseconds of Transformers' own cold first token, from ids to the token on the host."""
    found = {}
    for context in contexts:

        def forward(context: int = context) -> Any:
            ids = torch.randint(10, 1000, (1, context), device="cuda")
            with torch.inference_mode():
                return model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

        forward()
        found[context] = statistics.median(_seconds(forward) for _ in range(3)) * 1e3
    return found


def static_batches(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> Row:
    """Transformers' `generate` in batches of equal prompts."""
    begin = time.perf_counter()
    for at in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[at : at + batch], device="cuda")
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {"case": f"Transformers generate, {len(prompts)} requests in batches of {batch}",
            "output_tokens_per_s": len(prompts) * tokens / seconds, "seconds": seconds}  # fmt: skip


def continuous_batches(model: PreTrainedModel, requests: int, own: int, tokens: int) -> Row:
    """Transformers' `generate_batch`, all requests at once; a row with its error where it cannot run."""
    rng = random.Random(2)
    case = f"Transformers generate_batch, {requests} requests of {own}+{tokens}"
    source: Any = SimpleNamespace(model=model, eos_ids=(), device=model.device)
    try:
        engine = ContinuousBatchingEngine(source)
        try:
            engine.batch([[rng.randrange(10, 500) for _ in range(own)] for _ in range(32)], 8)
            found = engine.batch([[rng.randrange(10, 500) for _ in range(own)] for _ in range(requests)], tokens)
        finally:
            engine.close()
    except Exception as error:  # whatever it raises, the other rows are still wanted
        return {"case": case, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return {"case": case, "output_tokens_per_s": found.output_tokens / found.total_s, "seconds": found.total_s}


def run(
    shape: str, weights: str, quick: bool, decode_only: bool, with_throughput: bool, with_peers: bool
) -> dict[str, Any]:
    model = build(shape, weights)
    bandwidth = copy_bandwidth()
    contexts = () if decode_only else (1024, 4096, 8192) if quick else (1024, 4096, 8192, 32_768)
    cold = transformers_cold(model, contexts)
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 1000) for _ in range(512)] for _ in range(128)]
    theirs = []
    if with_peers:
        theirs = [static_batches(model, prompts, 128, 128), continuous_batches(model, 512, 512, 128)]
    torch.cuda.empty_cache()
    began = time.perf_counter()
    bench = Bench(model, bandwidth, cold, max_model_len=34_816 if not quick else 10_240)
    report: dict[str, Any] = {
        "shape": shape, "weights": f"random {weights}", "date": date.today().isoformat(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": __import__("transformers").__version__, "kvboost": kvboost.__version__,
        "command": "python -m kvboost.bench.gpu " + " ".join(sys.argv[1:]), "copy_gb_per_s": bandwidth / GB,
        "attention": bench.kv.attention_backend, "build_s": time.perf_counter() - began, "rows": [],
    }  # fmt: skip
    begin = time.perf_counter()
    report["graphs"] = 0 if decode_only else bench.kv.warm_up()  # decoding captures its own as it goes
    report["warm_up_s"] = time.perf_counter() - begin
    gc.collect()
    gc.freeze()  # a full collection over all modules of torch takes 0.3 s, in the middle of a measurement

    def add(row: Row) -> None:
        report["rows"].append(row)
        print("  ".join(f"{k} {v:,.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)

    for context, batch in DECODE[: 3 if decode_only else None]:
        add(bench.decode(context, batch))
    for context in contexts:
        add(bench.first_token(context))
    if with_throughput:
        for shared, own in ((0, 512), (2048, 64)):
            bench.throughput(shared, own, 64, 16)
            add(bench.throughput(shared, own, 512, 128))
    for row in theirs:
        add(row)
    bench.kv.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument(
        "--weights", choices=["bf16", "int4"], default="bf16", help="int4: groups of 128, as AWQ has them"
    )
    parser.add_argument("--decode-only", action="store_true", help="no first tokens, and no more than 64 sequences")
    parser.add_argument("--quick", action="store_true", help="no 32k context")
    parser.add_argument("--throughput", action="store_true", help="also 512 requests at once")
    parser.add_argument(
        "--peers", action="store_true", help="also Transformers' generate and generate_batch, which take minutes"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run(options.shape, options.weights, options.quick, options.decode_only, options.throughput, options.peers)
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
