"""SmolLM2 through `kvboost quantize` and back: packed products are those of the weights that were stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvboost import KVBoost
from kvboost.cli.main import app
from kvboost.models.loading import load_model, load_tokenizer, locate
from kvboost.weights.modules import PackedLinear
from kvboost.weights.safetensors_reader import TensorFiles

CPU = torch.device("cpu")
TEXT = "The lighthouse keeper climbed the stairs every evening, and every evening he counted them."


@pytest.fixture(scope="module")
def rounded(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("quantized") / "smollm2-rtn"
    result = CliRunner().invoke(app, ["quantize", str(smollm2_path), str(out), "--method", "rtn", "--group-size", "64"])
    assert result.exit_code == 0, result.output
    yield out


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


@pytest.mark.slow
def test_packed_logits_are_those_of_the_stored_weights(rounded: Path) -> None:
    ids = torch.tensor([load_tokenizer(locate(rounded))(TEXT)["input_ids"]])
    packed = load_model(locate(rounded), "float32", CPU)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 210
    exact = logits(load_model(locate(rounded), "float32", CPU, "dense"), ids)
    got = logits(packed, ids)
    assert (got - exact).norm() / exact.norm() < 1e-5
    assert torch.equal(got.argmax(-1), exact.argmax(-1))
    # Weights rounded to fp16, as dequantising to fp16 does: eleven bits, and no more than that apart.
    halved = load_model(locate(rounded), "float16", CPU, "dense").float()
    assert (got - logits(halved, ids)).norm() / exact.norm() < 5e-3


@pytest.mark.slow
def test_the_files_take_a_third_and_the_engine_serves_them(rounded: Path) -> None:
    files = TensorFiles.open(rounded)
    body = sum(t.nbytes for name, t in files.items() if ".layers." in name)
    assert body < 0.3 * 106e6 * 2  # 106 million weights in layers, 4.5 bits each; fp16 has 16
    with KVBoost.from_pretrained(str(rounded), num_blocks=64, dtype="float32") as llm:
        text = llm.generate("The capital of France is", max_new_tokens=4, do_sample=False).text
        llm.check()
    assert "Paris" in text
