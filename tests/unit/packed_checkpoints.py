"""Writes tiny checkpoints in other people's packed formats, word by word as those formats are defined."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

SHAPE = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors that a linear becomes, and the weight they stand for, fp32 `[n, k]`."""


def tiny(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start as zeros and ones
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(
    directory: Path, model: PreTrainedModel, quantization: Mapping[str, Any], linear: Callable[[Tensor], Written],
    dense: tuple[str, ...] = ("lm_head",), shards: int = 1,
) -> PreTrainedModel:  # fmt: skip
    """Save `model` with its linears in a packed format, and return the model whose weights are what was stored."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(dense):
            del tensors[f"{name}.weight"]
            parts, weight = linear(module.weight.detach())
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(weight)
    save(directory, tensors, shards)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (directory / "config.json").write_text(json.dumps(config))
    return model


def save(directory: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    (directory / "model.safetensors").unlink(missing_ok=True)
    listed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % shards == shard}
        save_file(part, directory / file, {"format": "pt"})
        listed |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def config_of(directory: Path) -> Any:
    return AutoConfig.from_pretrained(directory)


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 of values along the last axis: value `order[i]` of each word at bit `i * bits`."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    grouped = values.astype(np.uint32).reshape(*values.shape[:-1], -1, per_word)
    out = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for i, column in enumerate(order):
        out |= grouped[..., column] << np.uint32(i * bits)
    return torch.from_numpy(out.view(np.int32))


def numbers(weight: Tensor, bits: int, group: int, middle: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes `[n, k]`, zeros and scales `[n, groups]`; middle: all zeros are half of the range."""
    n, k = weight.shape
    random = np.random.default_rng(n * k + bits)
    groups = 1 if group == -1 else k // group
    codes = random.integers(0, 2**bits, (n, k))
    zeros = np.full((n, groups), 2 ** (bits - 1)) if middle else random.integers(0, 2**bits, (n, groups))
    scales = (random.random((n, groups)) * 0.02 + 1e-3).astype(np.float16)
    return codes, zeros, scales


def value(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensor:
    repeat = codes.shape[1] // zeros.shape[1]
    z, s = (np.repeat(x.astype(np.float32), repeat, axis=1) for x in (zeros, scales))
    return torch.from_numpy((codes.astype(np.float32) - z) * s)


def awq(group: int) -> Callable[[Tensor], Written]:
    def linear(weight: Tensor) -> Written:
        codes, zeros, scales = numbers(weight, 4, group, middle=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": words(np.ascontiguousarray(codes.T), 4, order),
            "qzeros": words(np.ascontiguousarray(zeros.T), 4, order),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
        }
        return parts, value(codes, zeros, scales)

    return linear


def gptq(bits: int, group: int, symmetric: bool, stored_less: int = 1) -> Callable[[Tensor], Written]:
    def linear(weight: Tensor) -> Written:
        codes, zeros, scales = numbers(weight, bits, group, symmetric)
        k = weight.shape[1]
        # Version 1 subtracts one from every value of a word at once, as one number.
        ones = sum(stored_less << (bits * i) for i in range(32 // bits))
        qzeros = words(np.ascontiguousarray(zeros.T), bits).numpy().view(np.uint32) - np.uint32(ones)
        parts = {
            "qweight": words(codes, bits).T,
            "qzeros": torch.from_numpy(qzeros.view(np.int32)),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            "g_idx": torch.arange(k, dtype=torch.int32) // (k if group == -1 else group),
        }
        return parts, value(codes, zeros, scales)

    return linear


def compressed(
    bits: int, group: int, symmetric: bool, packed: bool = True, packed_zeros: bool = True
) -> Callable[[Tensor], Written]:
    def linear(weight: Tensor) -> Written:
        codes, zeros, scales = numbers(weight, bits, group, symmetric)
        scales = torch.from_numpy(scales.astype(np.float32)).bfloat16()
        half = 2 ** (bits - 1)
        parts = {"weight_scale": scales}
        if packed:
            parts |= {"weight_packed": words(codes, bits), "weight_shape": torch.tensor(list(weight.shape))}
        else:
            parts["weight"] = torch.from_numpy((codes - half).astype(np.int8))
        if not symmetric:
            per_word = 32 // bits
            padded = np.pad(zeros, ((0, -len(zeros) % per_word), (0, 0)))
            parts["weight_zero_point"] = (
                words(np.ascontiguousarray(padded.T), bits).T
                if packed_zeros
                else torch.from_numpy((zeros - half).astype(np.int8))
            )
        return parts, value(codes, zeros, scales.float().numpy())

    return linear


def float8(shape: str, name: str = "weight_scale") -> Callable[[Tensor], Written]:
    """shape: tensor, channel or block (32 by 32)."""

    def linear(weight: Tensor) -> Written:
        n, k = weight.shape
        codes = (torch.randn(n, k) * 40).to(torch.float8_e4m3fn)
        size = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 32), k // 32)}[shape]
        scales = torch.rand(size) * 0.003 + 1e-4
        spread = scales.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1) if shape == "block" else scales
        return {"weight": codes, name: scales}, codes.float() * spread

    return linear


def ct_config(format: str, bits: int, group: int, symmetric: bool, **weights: Any) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    args = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": None if group == -1 else group, "dynamic": False, **weights,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}},
        "ignore": ["lm_head"],
    }  # fmt: skip


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "awq-g32": (AWQ, awq(32)),
    "awq-g64": ({**AWQ, "group_size": 64}, awq(64)),
    "awq-columns": ({**AWQ, "group_size": -1, "version": "GEMM"}, awq(-1)),
    "gptq-4-symmetric": (GPTQ, gptq(4, 32, True)),
    "gptq-4-asymmetric": ({**GPTQ, "sym": False}, gptq(4, 32, False)),
    "gptq-4-v2": ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 32, False, 0)),
    "gptq-8-symmetric": ({**GPTQ, "bits": 8, "group_size": 64}, gptq(8, 64, True)),
    "gptq-8-asymmetric": ({**GPTQ, "bits": 8, "sym": False}, gptq(8, 32, False)),
    "gptq-columns": ({**GPTQ, "group_size": -1}, gptq(4, -1, True)),
    "ct-4-group": (ct_config("pack-quantized", 4, 32, True), compressed(4, 32, True)),
    "ct-4-channel": (ct_config("pack-quantized", 4, -1, True), compressed(4, -1, True)),
    "ct-4-asymmetric": (ct_config("pack-quantized", 4, 64, False), compressed(4, 64, False)),
    "ct-4-plain-zeros": (ct_config("pack-quantized", 4, 32, False), compressed(4, 32, False, packed_zeros=False)),
    "ct-8-group": (ct_config("pack-quantized", 8, 32, True), compressed(8, 32, True)),
    "ct-8-asymmetric": (ct_config("pack-quantized", 8, -1, False), compressed(8, -1, False)),
    "ct-int8": (ct_config("int-quantized", 8, -1, True), compressed(8, -1, True, packed=False)),
    "ct-int8-asymmetric": (
        ct_config("int-quantized", 8, 32, False), compressed(8, 32, False, packed=False, packed_zeros=False),
    ),
    "ct-fp8-tensor": (ct_config("float-quantized", 8, -1, True, type="float", strategy="tensor"), float8("tensor")),
    "ct-fp8-channel": (ct_config("float-quantized", 8, -1, True, type="float"), float8("channel")),
    "fp8-blocks": (FP8, float8("block", "weight_scale_inv")),
    "fp8-tensor": ({**FP8, "weight_block_size": None}, float8("tensor", "weight_scale_inv")),
}  # fmt: skip
