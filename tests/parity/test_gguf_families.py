"""Tiny GGUF files of each family: packed in KVBoost against Transformers, which makes all weights dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gguf_files import HEAD_DIM, TinyFile
from kvboost import KVBoost
from kvboost.models.info import describe_model
from kvboost.models.loading import load_model, locate
from kvboost.weights.modules import PackedEmbedding, PackedLinear

CPU = torch.device("cpu")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kinds": ("Q4_K", "Q6_K")},
    "llama_k5": {"architecture": "llama", "kinds": ("Q5_K", "Q6_K")},
    "llama_legacy": {"architecture": "llama", "kinds": ("Q4_1", "Q5_1")},
    "llama_mixed": {"architecture": "llama", "kinds": ("Q4_0", "F16")},
    "llama_q2": {"architecture": "llama", "kinds": ("Q5_0", "Q2_K")},
    "mistral": {"architecture": "llama", "general.name": "Mistral 7B", "kinds": ("Q4_K", "Q5_K")},
    "qwen2": {"kinds": ("Q4_K", "Q6_K")},
    "qwen3": {"kinds": ("Q4_K", "Q6_K"), "head_dim": 128},
    "gemma2": {"kinds": ("Q4_K", "Q6_K")},
    "gemma3": {"kinds": ("Q5_0", "Q8_0")},
    "phi3": {"kinds": ("Q4_K", "Q6_K")},
}


def write(folder: Path, family: str) -> Path:
    options = dict(FAMILIES[family])
    return TinyFile(options.pop("architecture", family), **options).write(folder / f"{family}.gguf")


def dense(path: Path) -> PreTrainedModel:
    """As Transformers loads it alone, in fp32."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_dense(family: str, tmp_path: Path) -> None:
    path = write(tmp_path, family)
    reference = dense(path)
    prompts = [[5, 77, 31, 200, 9], [3], list(range(60, 100))]
    with KVBoost.from_pretrained(str(path), dtype="float32", num_blocks=64) as llm:
        packed = [m for m in llm.model.modules() if isinstance(m, (PackedLinear, PackedEmbedding))]
        assert len(packed) > 8
        assert llm.model.dtype == torch.float32 and not any(p.is_meta for p in llm.model.parameters())
        ids = torch.tensor([prompts[2]])
        with torch.inference_mode():
            ours, theirs = llm.model(ids).logits, reference(ids).logits
        torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)
        results = llm.generate(prompts, max_new_tokens=12, temperature=0, ignore_eos=True)
        llm.check()
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_asked_to_be_dense_it_has_the_parameters_of_transformers(family: str, tmp_path: Path) -> None:
    path = write(tmp_path, family)
    ours, theirs = load_model(locate(path), torch.float32, CPU, "dense"), dense(path)
    assert not any(isinstance(m, (PackedLinear, PackedEmbedding)) for m in ours.modules())
    expected = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


def test_tied_heads_share_their_rows_with_the_embedding(tmp_path: Path) -> None:
    tied = load_model(locate(write(tmp_path, "llama")), "bfloat16", CPU)
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert tied.dtype == torch.bfloat16
    own = load_model(locate(write(tmp_path, "phi3")), "bfloat16", CPU)
    assert own.get_input_embeddings().weight is not own.get_output_embeddings().weight


def test_buffers_are_those_of_a_model_built_with_its_weights(tmp_path: Path) -> None:
    for family in ("llama", "gemma3", "phi3"):
        path = write(tmp_path, family)
        ours, theirs = dict(load_model(locate(path), "float32", CPU).named_buffers()), dict(dense(path).named_buffers())
        assert ours and all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())


def test_siblings_lie_next_to_each_other(tmp_path: Path) -> None:
    model = load_model(locate(write(tmp_path, "qwen2")), "bfloat16", CPU)  # with biases between them by name
    layer = model.model.layers[1]
    for a, b in ((layer.self_attn.q_proj, layer.self_attn.k_proj), (layer.mlp.gate_proj, layer.mlp.up_proj)):
        assert b.weight.data_ptr() == a.weight.data_ptr() + a.weight.nbytes
        assert a.weight.data_ptr() % 64 == 0


def test_a_head_size_that_is_not_the_default_is_read_from_the_file(tmp_path: Path) -> None:
    """Transformers leaves Qwen3's key_length out, and takes 128."""
    path = TinyFile("qwen3", head_dim=HEAD_DIM).write(tmp_path / "x.gguf")
    model = load_model(locate(path), "float32", CPU)
    assert model.config.head_dim == HEAD_DIM
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def starcoder2(path: Path) -> Path:
    """An architecture that Transformers reads and we do not keep packed."""
    file = TinyFile("starcoder2", kinds=("Q4_0", "Q8_0"))
    for name in [name for name in file.tensors if name.endswith(".weight")]:
        rows, stem = file.tensors[name][0].shape[0], name.removesuffix(".weight")
        if "ffn_gate" in name:
            del file.tensors[name]
        elif "embd" not in name:
            file.add(f"{stem}.bias", (rows,))
    return file.write(path)


def test_other_architectures_are_made_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = starcoder2(tmp_path / "x.gguf")
    with caplog.at_level("WARNING", "kvboost"):
        model = load_model(locate(path), "float32", CPU)
    assert "x.gguf: weights are made dense, because the architecture starcoder2 is not among llama" in caplog.text
    held = describe_model(str(path)).weights
    assert held is not None and held.startswith("made dense: the architecture starcoder2")
    expected = dict(dense(path).named_parameters())
    assert expected and all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_the_log_says_what_is_packed_and_what_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvboost"):
        load_model(locate(write(tmp_path, "llama_q2")), "float32", CPU)
    # 2 layers of 7 matrices, 2 of them Q2_K, and the embedding
    assert "11 matrices stay packed" in caplog.text and "4 tensors (Q2_K) are made dense" in caplog.text
