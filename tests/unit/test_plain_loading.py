"""Plain checkpoints on a CPU are read by us, where we can: the same weights that Transformers loads, in one buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvboost.errors import ModelLoadError
from kvboost.models.loading import load_config, load_model, locate
from stream_rig import tiny


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plain_directory_is_read_straight_into_an_arena(tmp_path: Path, dtype: str) -> None:
    """What Transformers would load, tied weights tied, in one buffer; a part in fp32 where the model wants it so."""
    for family in ("llama-tied", "gemma2", "phi3", "bloom", "mixtral"):
        directory = tmp_path / family
        tiny(family).save_pretrained(directory)
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        ours = load_model(locate(directory), dtype, torch.device("cpu"))
        got, want = ours.state_dict(), theirs.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype for name in want)
        storages = {p.untyped_storage().data_ptr() for p in ours.parameters()}
        if family not in ("mixtral",):  # Transformers merges its experts
            assert len(storages) == 1
        assert (ours.get_input_embeddings().weight is ours.lm_head.weight) == (
            family in ("llama-tied", "gemma2", "bloom")
        )


def test_tensors_that_belong_to_nothing_are_left_to_transformers(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.layer.weight": torch.zeros(4, 4)}, file, metadata={"format": "pt"})
    model = load_model(locate(tmp_path), "float32", torch.device("cpu"))
    assert torch.equal(model.model.embed_tokens.weight, tiny("llama").model.embed_tokens.weight)


def test_a_name_that_is_neither_a_directory_nor_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, as all tests are: a directory that was mistyped looks like a Hub id."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="smollm2-awk: not a directory here, and as a Hub id not read: "):
        load_config(locate("smollm2-awk"))
    tiny("llama").save_pretrained("damaged")
    Path("damaged/config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="damaged: the model's config could not be read: "):
        load_config(locate("damaged"))
