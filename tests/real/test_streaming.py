"""SmolLM2 with streamed layers: the same tokens as with resident ones, in less memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvboost import KVBoost
from stream_rig import budget_gib

LAYERS = 30

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "Once upon a time, in a village at the foot of a mountain,",
    "List five animals that live in the ocean and say one thing about each of them. " * 6,
    "Q: What is 12 times 12? A:",
]

OPTIONS: dict[str, Any] = {"kv_cache_gib": 0.1, "max_num_batched_tokens": 256}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(hf_smollm2: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """SmolLM2 in bf16 as a model directory."""
    from transformers import AutoTokenizer

    config = type(hf_smollm2.config).from_dict(
        {k: v for k, v in hf_smollm2.config.to_dict().items() if k != "quantization_config"}
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(hf_smollm2.state_dict())
    path = tmp_path_factory.mktemp("smollm2-bf16")
    model.to(torch.bfloat16).save_pretrained(path)
    AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name).save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Layer files of these tests lie in a directory of their own; compiled kernels are loaded before that."""
    from kvboost.kernels.native.library import unavailable

    unavailable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBOOST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def answers(kv: KVBoost, prompts: list[str]) -> list[list[int]]:
    return [r.token_ids for r in kv.generate(prompts, **GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "fp32", "packed gguf"])
def test_streamed_equals_resident(form: str, directory: Path, smollm2_path: Path) -> None:
    """With 0, 1 and half of the layers resident; one and eight at once; after an aborted request."""
    path = smollm2_path if form == "packed gguf" else directory
    options = {**OPTIONS, "dtype": "float32" if form == "fp32" else "bfloat16"}
    with KVBoost.from_pretrained(str(path), **options) as kv:
        eight, alone = answers(kv, PROMPTS), answers(kv, PROMPTS[:1])
        budgets = {n: budget_gib(kv.model, n) for n in (0, 1, LAYERS // 2)}
        fused, namespace = kv.built.fused, kv.built.namespace
    for resident, budget in budgets.items():
        with KVBoost.from_pretrained(str(path), weights_budget_gib=budget, **options) as kv:
            weights = kv.stats().weights
            assert weights is not None and weights.layers_resident == resident
            assert (kv.built.fused, kv.built.namespace) == (fused, namespace)
            assert answers(kv, PROMPTS) == eight, resident
            kv.reset_cache()
            for piece in kv.stream(PROMPTS[6], max_new_tokens=100, temperature=0, ignore_eos=True):
                if len(piece.token_ids):
                    break
            assert answers(kv, PROMPTS[:1]) == alone, resident
            kv.check()


MEASURE = """
import json, sys
import kvboost.api.kvboost
from kvboost import KVBoost

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

path, options = sys.argv[1], json.loads(sys.argv[2])
before = status("VmRSS")
with KVBoost.from_pretrained(path, **options) as kv:
    kv.generate("The capital of France is", max_new_tokens=4, temperature=0)
    print(json.dumps({"peak": status("VmHWM") - before, "end": status("RssAnon")}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's accounts of memory")
def test_a_streamed_model_takes_less_memory_from_the_first_byte_on(directory: Path, smollm2_path: Path) -> None:
    """The peak, loading included, over a process that has imported the same; in fresh processes."""

    def measure(path: Path, **options: Any) -> int:
        given = {**OPTIONS, "kv_cache_gib": 0.01, "dtype": "bfloat16", **options}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), json.dumps(given)],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout.splitlines()[-1])["peak"])

    whole, budget = measure(directory), 80 << 20
    first, again = (measure(directory, weights_budget_gib=budget / 2**30) for _ in range(2))
    weights = 269_000_000
    for streamed in (first, again):
        assert streamed < whole - 0.5 * (weights - budget), (whole, first, again)
