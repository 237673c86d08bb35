"""What Transformers leaves out of a GGUF file's config: rotary scaling and head sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gguf_files import HEAD_DIM, TinyFile
from kvboost.errors import ModelLoadError
from kvboost.models.loading import load_config, load_model, locate

CPU = torch.device("cpu")
PAIRS = HEAD_DIM // 2


def llama3_factors(factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As llama.cpp's converter computes them for Llama 3.1, written out pair by pair."""
    found = []
    for pair in range(PAIRS):
        wave = 2 * np.pi * 10_000 ** (pair / PAIRS)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def with_tensor(file: TinyFile, **tensors: np.ndarray[Any, Any]) -> TinyFile:
    for name, values in tensors.items():
        file.tensors[f"{name}.weight"] = (values, "F32")
    return file


def frequencies(model: PreTrainedModel) -> torch.Tensor:
    return model.model.rotary_emb.inv_freq


def rebuilt(config: Any) -> PreTrainedModel:
    """A model that Transformers makes of the config alone."""
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("weights", ["auto", "dense"])
def test_llama3_factors_become_rotary_parameters(weights: str, tmp_path: Path) -> None:
    factors = llama3_factors(8.0)
    assert np.unique(factors).size > 1 and factors.max() == 8
    path = with_tensor(TinyFile("llama"), rope_freqs=factors).write(tmp_path / "x.gguf")
    model = load_model(locate(path), "float32", CPU, weights)
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 8.0)
    plain = 1 / 10_000 ** (torch.arange(PAIRS) / PAIRS)
    torch.testing.assert_close(frequencies(model), plain / torch.from_numpy(factors), rtol=1e-4, atol=0)
    assert torch.equal(frequencies(model), frequencies(rebuilt(model.config)))


def test_other_factors_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, PAIRS, dtype=np.float32)
    path = with_tensor(TinyFile("llama"), rope_freqs=factors).write(tmp_path / "x.gguf")
    model = load_model(locate(path), "float32", CPU)
    plain = 1 / 10_000 ** (torch.arange(PAIRS) / PAIRS)
    torch.testing.assert_close(frequencies(model), plain / torch.from_numpy(factors), rtol=1e-5, atol=0)
    assert model.model.rotary_emb.attention_scaling == 1.0


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    path = with_tensor(TinyFile("llama"), rope_freqs=np.ones(PAIRS, np.float32)).write(tmp_path / "x.gguf")
    assert load_config(locate(path)).rope_parameters["rope_type"] == "default"


def test_phi3_long_and_short_factors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 9, PAIRS, dtype=np.float32), np.linspace(1, 2, PAIRS, dtype=np.float32)
    file = TinyFile("phi3", **{"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": 1.19})
    path = with_tensor(file, rope_factors_long=long, rope_factors_short=short).write(tmp_path / "x.gguf")
    model = load_model(locate(path), "float32", CPU)
    rotary = model.model.rotary_emb
    plain = 1 / 10_000 ** (torch.arange(PAIRS) / PAIRS)
    torch.testing.assert_close(rotary.inv_freq, plain / torch.from_numpy(short), rtol=1e-5, atol=0)
    assert rotary.attention_scaling == pytest.approx(1.19)
    assert model.config.original_max_position_embeddings == 128
    near, far = torch.tensor([[0, 1]]), torch.tensor([[0, 200]])
    assert not torch.equal(rotary(torch.zeros(1), near)[0][0, 1], rotary(torch.zeros(1), far)[0][0, 1])


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    scaling = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}
    linear = load_model(locate(TinyFile("qwen2", **scaling).write(tmp_path / "a.gguf")), "float32", CPU)
    torch.testing.assert_close(frequencies(linear), 1 / 10_000 ** (torch.arange(PAIRS) / PAIRS) / 4)
    scaling |= {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.original_context_length": 128}
    yarn = load_config(locate(TinyFile("qwen2", **scaling).write(tmp_path / "b.gguf")))
    rope = yarn.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


def test_gemma3_scales_its_global_layers_only(tmp_path: Path) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = load_config(locate(TinyFile("gemma3", **scaling).write(tmp_path / "x.gguf")))
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({}, {"rope_freqs": np.ones(2 * HEAD_DIM, np.float32)}, "'rope_freqs.weight' is F32"),
        ({}, {"rope_freqs": np.zeros(PAIRS, np.float32)}, "'rope_freqs.weight' has factors that are not above 0"),
        ({}, {"rope_factors_long": np.ones(PAIRS, np.float32)}, "original_context_length is None"),
        (
            {"llama.rope.scaling.original_context_length": 64},
            {"rope_factors_long": np.ones(PAIRS, np.float32)},
            "'rope_factors_short.weight' is missing",
        ),
        ({"llama.rope.scaling.type": "linear"}, {}, "llama.rope.scaling.factor is None"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {}, "original_context_length is None"),
    ],
)  # fmt: skip
def test_scaling_that_makes_no_sense_is_named(
    metadata: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = with_tensor(TinyFile("llama", **metadata), **tensors).write(tmp_path / "x.gguf")
    with pytest.raises(ModelLoadError, match=message):
        load_config(locate(path))


def test_a_plain_file_has_the_config_that_transformers_reads(tmp_path: Path) -> None:
    for architecture in ("llama", "gemma3", "phi3"):
        path = TinyFile(architecture).write(tmp_path / f"{architecture}.gguf")
        ours, theirs = load_config(locate(path)), AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        assert ours.to_dict() == theirs.to_dict()
