"""`kvboost quantize` on tiny models: which scales may move, that moving them changes nothing, what is written, and that
an interrupted run ends in the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config

import packed_checkpoints as made
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.loading import load_model, load_plain, locate
from kvboost.weights.awq import pack_words
from kvboost.weights.modules import PackedLinear
from kvboost.weights.quantize.blocks import Calls, find_blocks
from kvboost.weights.quantize.calibration import calibration_text, sequences
from kvboost.weights.quantize.folds import find_folds
from kvboost.weights.quantize.run import Settings, quantize
from kvboost.weights.quantize.search import best_ranges, rounded_weight

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]


class Letters:
    """A tokenizer for models of 96 tokens: a token is a byte."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [b % 96 for b in text.encode()]}

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


def outliers(model: Any) -> Any:
    """Make some channels large before the linears, as in trained models: what activation-aware scaling is about."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("input_layernorm.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight")
            ):
                parameter[::9] += 10
            elif parameter.ndim == 2:
                parameter *= 0.25
    return model


def gemma3() -> Any:
    config = Gemma3TextConfig(
        **{**made.SHAPE, "head_dim": 16, "sliding_window": 16}, query_pre_attn_scalar=16, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


MODELS = {
    "llama": lambda: made.tiny(),
    "heads alike": lambda: made.tiny(num_key_value_heads=4),
    "qwen2": lambda: made.tiny("qwen2"),
    "gemma3": gemma3,
    "phi3": lambda: AutoModelForCausalLM.from_config(Phi3Config(**made.SHAPE, pad_token_id=0)).eval(),
}

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
EXPECTED = {
    "llama": [QKV, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)],
    "heads alike": [QKV, ("mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj",), ("mlp.down_proj",)],
    "qwen2": [QKV, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)],
    "gemma3": [QKV, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)],
    "phi3": [("self_attn.qkv_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)],
}


@pytest.mark.parametrize("name", MODELS)
def test_scales_that_can_move_are_found_and_moving_them_changes_nothing(name: str) -> None:
    model = MODELS[name]()
    _, blocks = find_blocks(model)
    calls = Calls(model, blocks, torch.arange(40).view(2, 20))  # two sequences: a linear is seen twice
    block = blocks[0]
    run = lambda: torch.cat([calls.run(block, 0, hidden, CPU) for hidden in calls.hidden])  # noqa: E731
    with torch.no_grad():
        own = run()
        folds = find_folds(block, run, torch.float16)
        assert [fold.names for fold in folds] == EXPECTED[name]
        torch.testing.assert_close(run(), own, rtol=0, atol=0)  # trials are undone
        for fold in folds:
            k = fold.linears[0].weight.shape[1]
            fold.apply(torch.rand(k) + 0.5, torch.bfloat16)  # norms are rounded; the linears make up for it
        torch.testing.assert_close(run(), own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))
        norm = next(p for n, p in block.named_parameters() if n == "input_layernorm.weight")
        assert torch.equal(norm, norm.bfloat16().float())


def test_a_norm_whose_output_is_read_elsewhere_is_left_alone() -> None:
    model = made.tiny()
    _, blocks = find_blocks(model)
    calls = Calls(model, blocks, torch.arange(20).view(1, 20))
    block = blocks[0]
    norm = block.post_attention_layernorm
    mlp = block.mlp.forward
    block.mlp.forward = lambda x: mlp(x) + x  # a residual taken after the norm, as BLOOM may have
    run = lambda: calls.run(block, 0, calls.hidden[0], CPU)  # noqa: E731
    assert all(fold.feeder.module is not norm for fold in find_folds(block, run, torch.float16))


def test_ranges_are_cut_where_that_helps_and_never_where_it_harms() -> None:
    weight = torch.randn(40, 128) * 0.02
    weight[:, 3] = 1.0  # an outlier whose input is always zero: its range is for nothing
    x = torch.randn(200, 128)
    x[:, 3] = 0
    low, high = best_ranges(weight, x, torch.ones(200), 64)
    assert (high[:, 0] < 0.61).all() and low.shape == (40, 2)
    plain = torch.ones(200)
    x[:, 3] = 100.0  # now it is what matters most
    low, high = best_ranges(weight, x, plain, 64)
    assert (high[:, 0] > 0.9).all()


def output_error(model: Any, reference: Tensor) -> float:
    with torch.no_grad():
        return float((model(IDS).logits - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_awq_loses_less_than_rounding_and_loads_packed(name: str, tmp_path: Path) -> None:
    errors = {}
    for method in ("rtn", "awq"):
        torch.manual_seed(7)
        model = outliers(MODELS[name]())
        with torch.no_grad():
            reference = model(IDS).logits
        quantize(model, Letters(), tmp_path / method, Settings(method, 32, samples=4), CPU)
        loaded = load_model(locate(tmp_path / method), "float32", CPU)
        assert sum(isinstance(m, PackedLinear) for m in loaded.modules()) == 14
        errors[method] = output_error(loaded, reference)
    assert errors["awq"] < 0.85 * errors["rtn"]


def test_what_is_written_is_what_awq_loaders_expect(tmp_path: Path) -> None:
    out = quantize(made.tiny("qwen2").bfloat16(), Letters(), tmp_path / "out", Settings("rtn", 32), CPU)
    tensors = load_file(out / "model.safetensors")
    q = "model.layers.0.mlp.down_proj"  # 128 inputs, 64 outputs
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items() if n.startswith(q)} == {
        f"{q}.qweight": ((128, 8), torch.int32),
        f"{q}.qzeros": ((4, 8), torch.int32),
        f"{q}.scales": ((4, 64), torch.float16),
    }
    assert tensors["model.layers.0.self_attn.q_proj.bias"].dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["Qwen2ForCausalLM"]
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
    assert not (tmp_path / "out.partial").exists()
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    from transformers import AwqConfig

    settings = AwqConfig(**{k: v for k, v in config["quantization_config"].items() if k != "quant_method"})
    assert (settings.bits, settings.group_size, settings.format) == (4, 32, "gemm")


def test_words_are_packed_as_they_are_read() -> None:
    values = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    assert torch.equal(pack_words(values), made.words(values.numpy(), 4, (0, 2, 4, 6, 1, 3, 5, 7)))


def test_a_tied_head_is_written_once_and_odd_outputs_stay_dense(tmp_path: Path) -> None:
    model = made.tiny(tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1, head_dim=36)
    with pytest.raises(ConfigError, match="group_size"):  # 72 inputs of o_proj
        quantize(model, None, tmp_path / "out", Settings("rtn", 32), CPU)
    model = made.tiny(tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=1, head_dim=12)
    out = quantize(model, None, tmp_path / "out", Settings("rtn", 32), CPU)
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert "model.layers.0.self_attn.k_proj.weight" in tensors  # 12 outputs fill no whole words of 8
    config = json.loads((out / "config.json").read_text())
    assert "model.layers.1.self_attn.v_proj" in config["quantization_config"]["modules_to_not_convert"]
    loaded = load_model(locate(out), "float32", CPU)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


class Stop(Exception):
    pass


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    model = made.tiny(num_hidden_layers=3)
    model.save_pretrained(tmp_path / "model")
    settings = Settings("awq", 32, samples=2)
    whole = quantize(load_plain(locate(tmp_path / "model")), Letters(), tmp_path / "whole", settings, CPU)
    seen: list[int] = []

    def stop_at_two(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        quantize(
            load_plain(locate(tmp_path / "model")), Letters(), tmp_path / "out", settings, CPU, progress=stop_at_two
        )
    part = tmp_path / "out.partial" / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-5])  # torn, as by a full disk
    kept = (tmp_path / "out.partial" / "part-00000.safetensors").stat().st_mtime_ns
    first = quantize(
        load_plain(locate(tmp_path / "model")), Letters(), tmp_path / "out", settings, CPU,
        progress=lambda done, total: seen.append((tmp_path / "out.partial" / "part-00000.safetensors").stat().st_mtime_ns),
    )  # fmt: skip
    assert set(seen) == {kept}  # not made again
    assert (first / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_parts_of_another_plan_are_not_used(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        quantize(made.tiny(), None, tmp_path / "out", Settings("rtn", 32), CPU, progress=stop)
    torch.manual_seed(5)
    other = made.tiny()
    expected = rounded_weight(other.model.layers[0].mlp.up_proj.weight.detach().float(), 64)
    out = quantize(other, None, tmp_path / "out", Settings("rtn", 64), CPU)
    loaded = load_model(locate(out), "float32", CPU)
    module = loaded.model.layers[0].mlp.up_proj
    torch.testing.assert_close(module.packing.dense(module.weight), expected)


def test_out_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    out = quantize(made.tiny(), None, tmp_path / "out", Settings("rtn", 32), CPU)
    with pytest.raises(ConfigError, match="--overwrite"):
        quantize(made.tiny(), None, out, Settings("rtn", 32), CPU)
    quantize(made.tiny(), None, out, Settings("rtn", 64), CPU, overwrite=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["group_size"] == 64
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("x")
    with pytest.raises(ConfigError, match="no model directory"):
        quantize(made.tiny(), None, precious, Settings("rtn", 32), CPU, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"method": "gptq"}, "method"), ({"group_size": 48}, "group_size"), ({"samples": 0}, "samples")],
)
def test_bad_settings_name_their_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Settings(**arguments)


def test_bad_input_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"group_size: 128 does not divide.*64 or 32"):
        quantize(made.tiny(), None, tmp_path / "out", Settings("rtn", 128), CPU)
    with pytest.raises(ConfigError, match="tokenizer"):
        quantize(made.tiny(), None, tmp_path / "out", Settings("awq", 32), CPU)
    with pytest.raises(ConfigError, match="calibration"):
        quantize(made.tiny(), Letters(), tmp_path / "out", Settings("awq", 32, str(tmp_path / "absent.txt")), CPU)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match="too few"):
        quantize(made.tiny(), Letters(), tmp_path / "out", Settings("awq", 32, str(tmp_path / "short.txt")), CPU)
    from transformers import GPT2Config, MixtralConfig

    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModel, match="no plain linears"):
        quantize(gpt2, None, tmp_path / "out", Settings("rtn", 32), CPU)
    experts = AutoModelForCausalLM.from_config(MixtralConfig(**made.SHAPE, num_local_experts=2))
    with pytest.raises(UnsupportedModel, match="experts"):
        quantize(experts, None, tmp_path / "out", Settings("rtn", 32), CPU)
    assert not list(tmp_path.glob("out*"))


def test_the_built_in_text_is_varied_and_long_enough() -> None:
    text = calibration_text(None)
    ids = sequences(Letters(), text, None)
    assert ids.shape[1] == 512 and ids.shape[0] >= 20
    for sample in ("def ", "SELECT", "Assistant:", "библиотека", "村子", "- 2 kg", "Die Bahn"):
        assert sample in text
