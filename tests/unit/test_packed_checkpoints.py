"""Packed checkpoints of other tools: exact in values, whatever the layout; refused by name where they are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import packed_checkpoints as made
from kvboost.errors import ConfigError, ModelLoadError, UnsupportedModel
from kvboost.models.loading import Source, load_model, locate
from kvboost.weights.checkpoint import load_packed_checkpoint
from kvboost.weights.modules import PackedLinear

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]


def load(directory: Path, weights: str = "auto", dtype: str = "float32") -> Any:
    return load_model(locate(directory), dtype, CPU, weights)


def packed_linears(model: torch.nn.Module) -> dict[str, PackedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}


@pytest.mark.parametrize("name", made.FORMATS)
def test_every_weight_is_what_the_file_says_and_the_logits_follow(name: str, tmp_path: Path) -> None:
    quantization, linear = made.FORMATS[name]
    reference = made.write(tmp_path, made.tiny("qwen2"), quantization, linear)
    model = load(tmp_path)
    packed = packed_linears(model)
    assert len(packed) == 14
    for path, module in packed.items():
        # A symmetric 4-bit row is computed as a * q + b: one rounding more than (q - 8) * a where scales have 24 bits.
        expected = reference.get_submodule(path).weight
        torch.testing.assert_close(module.packing.dense(module.weight), expected, rtol=2e-7, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=1e-4, atol=1e-4)
        dense = load(tmp_path, "dense")
        assert not packed_linears(dense)
        torch.testing.assert_close(dense(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activations_have_the_dtype_asked_for_and_scales_keep_theirs(dtype: str, tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    model = load(tmp_path, dtype=dtype)
    assert model.dtype == getattr(torch, dtype) == model(IDS).logits.dtype
    module = next(iter(packed_linears(model).values()))
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.scales"]
    assert torch.equal(module.packing.affine(module.weight)[0].T.half(), stored)


def test_shards_biases_and_a_tied_head(tmp_path: Path) -> None:
    reference = made.write(tmp_path, made.tiny("qwen2", tie_word_embeddings=True), made.AWQ, made.awq(32), shards=3)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.bias.abs().sum() > 0
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=1e-4, atol=1e-4)


def test_modules_left_dense_stay_so(tmp_path: Path) -> None:
    config = {**made.AWQ, "modules_to_not_convert": ["down_proj", "layers.1"]}
    reference = made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32), dense=("lm_head", "down_proj"))
    model = load(tmp_path)
    assert len(packed_linears(model)) == 12
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=1e-4, atol=1e-4)
    rewrite(tmp_path, config)
    with pytest.raises(ModelLoadError, match=r"layers\.1\..*modules_to_not_convert"):
        load(tmp_path)


def test_the_engine_serves_a_packed_checkpoint(tmp_path: Path) -> None:
    from kvboost import KVBoost

    reference = made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    with KVBoost.from_pretrained(str(tmp_path), dtype="float32", num_blocks=64) as llm:
        got = llm.generate(list(range(5, 40)), max_new_tokens=8, do_sample=False).token_ids
        llm.check()
    ids = reference.generate(torch.arange(5, 40)[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert list(got) == ids[0, 35:].tolist()


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a download lays it out; the tests run offline."""
    from huggingface_hub import constants

    folder = tmp_path / "models--someone--tiny-awq"
    made.write(folder / "snapshots" / ("0" * 40), made.tiny(), made.AWQ, made.awq(32))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = load_model(Source("someone/tiny-awq"), "float32", CPU)
    assert len(packed_linears(model)) == 14


# -- refusals --------------------------------------------------------------------------------------------------------


def rewrite(directory: Path, quantization: dict[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def with_activations() -> dict[str, Any]:
    config = made.ct_config("int-quantized", 8, -1, True)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    return config


REFUSED = {
    "gemv_fast": {**made.AWQ, "version": "gemv_fast"},
    "'gemv'": {**made.AWQ, "version": "GEMV"},
    "llm-awq": {**made.AWQ, "backend": "llm-awq"},
    "bits=3": {**made.AWQ, "bits": 3},
    "zero_point": {**made.AWQ, "zero_point": False},
    "marlin": {**made.GPTQ, "checkpoint_format": "marlin"},
    "bits=2": {**made.GPTQ, "bits": 2},
    "dynamic": {**made.GPTQ, "dynamic": {"+:layers": {"bits": 8}}},
    "input_activations": with_activations(),
    "marlin-24": made.ct_config("marlin-24", 4, 32, True),
    "nvfp4": made.ct_config("nvfp4-pack-quantized", 4, 16, True, type="float"),
    "activation_scheme 'static'": {**made.FP8, "activation_scheme": "static"},
    "'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "'aqlm'": {"quant_method": "aqlm"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_variants_are_refused_by_name(what: str, tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    config = made.config_of(tmp_path)
    config.quantization_config = REFUSED[what]
    with pytest.raises(ModelLoadError, match=what.replace("(", r"\(")):
        load_packed_checkpoint(tmp_path, config, torch.float32, CPU)


DAMAGED: list[dict[str, Any]] = [
    {**made.AWQ, "group_size": "32"}, {**made.AWQ, "group_size": 0}, {**made.AWQ, "bits": [4]},
    {**made.AWQ, "modules_to_not_convert": 7}, {**made.GPTQ, "bits": 4.0}, {**made.GPTQ, "dynamic": 3},
    {**made.FP8, "weight_block_size": [0, 32]}, {**made.FP8, "weight_block_size": "x"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": 5}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": [1]},
    made.ct_config("pack-quantized", 4, 32, True, num_bits="4"), {"quant_method": ["awq"]}, {},
]  # fmt: skip


@pytest.mark.parametrize("quantization", DAMAGED, ids=str)
def test_a_damaged_config_is_an_error_and_no_crash(quantization: dict[str, Any], tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(num_hidden_layers=1), made.AWQ, made.awq(32))
    config = made.config_of(tmp_path)
    config.quantization_config = quantization
    with pytest.raises(ModelLoadError, match="quantization_config"):
        load_packed_checkpoint(tmp_path, config, torch.float32, CPU)


def test_act_order_is_refused(tmp_path: Path) -> None:
    def scattered(weight: torch.Tensor) -> made.Written:
        parts, value = made.gptq(4, 32, True)(weight)
        parts["g_idx"] = parts["g_idx"].flip(0)
        return parts, value

    made.write(tmp_path, made.tiny(), {**made.GPTQ, "desc_act": True}, scattered)
    with pytest.raises(ModelLoadError, match=r"q_proj.*desc_act"):
        load(tmp_path)


def test_packed_experts_are_refused(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {name.replace("mlp.", "mlp.experts.0."): tensors.pop(name) for name in list(tensors) if ".mlp." in name}
    made.save(tmp_path, tensors | experts)
    with pytest.raises(UnsupportedModel, match="experts"):
        load(tmp_path)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_is_not_rounded_again(weights: str, tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    with pytest.raises(ConfigError, match="weights"):
        load(tmp_path, weights)


def change(directory: Path, edit: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    made.save(directory, tensors)


Q = "model.layers.1.self_attn.q_proj"

EDITS: dict[str, tuple[Any, str]] = {
    "missing zeros": (lambda t: t.pop(f"{Q}.qzeros"), rf"{Q}\.qzeros"),
    "missing words": (lambda t: t.pop(f"{Q}.qweight"), rf"{Q}\.weight"),
    "missing norm": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight.* missing"),
    "surplus": (lambda t: t.update({"model.layers.9.x": torch.zeros(3)}), r"model\.layers\.9\.x"),
    "wrong shape": (lambda t: t.update({f"{Q}.qweight": torch.zeros(64, 9, dtype=torch.int32)}), r"qweight.*\[64, 8\]"),
    "wrong dtype": (lambda t: t.update({f"{Q}.qweight": torch.zeros(64, 8)}), r"qweight.*int32"),
    "wrong group": (lambda t: t.update({f"{Q}.scales": torch.zeros(4, 64).half()}), r"scales.*\[2, 64\]"),
    "no number": (lambda t: t[f"{Q}.scales"].fill_(float("nan")), r"scales.*finite"),
    "integers as norm": (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), r"model\.norm"),
    "norm of other size": (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model\.norm\.weight.*\[64\]"),
    "nothing packed": (
        lambda t: [t.pop(n) for n in list(t) if n.endswith(("qweight", "qzeros", "scales"))], r"no tensor.*qweight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_files_that_do_not_fit_name_the_tensor(what: str, tmp_path: Path) -> None:
    edit, message = EDITS[what]
    made.write(tmp_path, made.tiny(), made.AWQ, made.awq(32))
    change(tmp_path, edit)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_biases_of_zeros_are_ignored_and_others_are_not(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny(), made.GPTQ, made.gptq(4, 32, True))
    change(tmp_path, lambda t: t.update({f"{Q}.bias": torch.zeros(64)}))
    load(tmp_path)
    change(tmp_path, lambda t: t[f"{Q}.bias"].add_(1))
    with pytest.raises(ModelLoadError, match=rf"{Q}\.bias"):
        load(tmp_path)


def test_weights_are_filled_layer_by_layer_where_they_are_told_to_lie(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny("qwen2"), made.AWQ, made.awq(32))
    config, asked, memory = made.config_of(tmp_path), [], {}

    def measure(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def place(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory[name] = torch.empty(shape, dtype=dtype)
        return memory[name]

    empty = load_packed_checkpoint(tmp_path, config, torch.float32, CPU, place=measure)
    model = load_packed_checkpoint(tmp_path, config, torch.float32, CPU, place=place)
    assert empty is not None and model is not None
    shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in empty.named_parameters()} == shapes
    assert all(p.is_meta for p in empty.parameters())
    assert asked == list(memory)
    assert all(p.data_ptr() == memory[name].data_ptr() for name, p in model.named_parameters())
    layers = [name.split(".")[2] for name in asked if ".layers." in name]
    assert layers == sorted(layers)  # a streamer takes a layer away when it is done
