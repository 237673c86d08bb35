"""Writes tiny GGUF files of random weights, laid out and named as llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

HIDDEN, MIDDLE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 2, 4, 2, 64, 288

FLOATS = {"F32": np.float32, "F16": np.float16}
FP16_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}
"""Where the fp16 scales of a block stand, for types that the `gguf` package cannot quantise."""


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    """Random weights of about 0.05 as the bytes `[..., row_bytes]` of a type."""
    number = GGMLQuantizationType[kind]
    if kind not in FP16_AT:
        values = rng.normal(0, 0.05, shape).astype(np.float32)
        return values.astype(FLOATS[kind]) if kind in FLOATS else quantize(values, number)
    block, size = GGML_QUANT_SIZES[number]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for i, at in enumerate(FP16_AT[kind]):
        scale = {"Q4_K": (2e-4, 2e-3), "Q5_K": (1e-4, 2e-3), "Q6_K": (3e-5,), "Q2_K": (4e-3, 4e-3)}[kind][i]
        scales = (rng.uniform(0.5, 1, raw.shape[:-1]) * scale).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


class TinyFile:
    """A file in the making. kinds: types of the matrices; v and down get the second, as in Q4_K_M."""

    def __init__(
        self, architecture: str, kinds: tuple[str, str] = ("Q4_0", "Q8_0"), head_dim: int = HEAD_DIM, **metadata: Any
    ) -> None:
        self.architecture, self.kinds, self.head_dim = architecture, kinds, head_dim
        self.rng = np.random.default_rng(7)
        self.tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
        self.metadata = metadata
        self._fill()

    def add(self, name: str, shape: tuple[int, ...], kind: str = "F32", mean: float = 0.0) -> None:
        raw = blocks(self.rng, shape, kind)
        self.tensors[name] = ((raw + mean).astype(np.float32) if mean else raw, kind)

    def _fill(self) -> None:
        first, second = self.kinds
        queries, keys = HEADS * self.head_dim, KV_HEADS * self.head_dim
        self.add("token_embd.weight", (VOCABULARY, HIDDEN), "Q8_0")
        self.add("output_norm.weight", (HIDDEN,), mean=1)
        if self.architecture in ("qwen2", "phi3"):
            self.add("output.weight", (VOCABULARY, HIDDEN), "Q6_K")
        for layer in range(LAYERS):
            at = f"blk.{layer}"
            names = ["attn_norm", "ffn_norm"]
            if self.architecture.startswith("gemma"):
                names += ["post_attention_norm", "post_ffw_norm"]
            for name in names:
                self.add(f"{at}.{name}.weight", (HIDDEN,), mean=1)
            if self.architecture in ("qwen3", "gemma3"):
                for name in ("attn_q_norm", "attn_k_norm"):
                    self.add(f"{at}.{name}.weight", (self.head_dim,), mean=1)
            if self.architecture == "phi3":
                self.add(f"{at}.attn_qkv.weight", (queries + 2 * keys, HIDDEN), second)
                self.add(f"{at}.ffn_up.weight", (2 * MIDDLE, HIDDEN), first)
            else:
                for name, rows, kind in (("q", queries, first), ("k", keys, first), ("v", keys, second)):
                    self.add(f"{at}.attn_{name}.weight", (rows, HIDDEN), kind)
                    if self.architecture == "qwen2":
                        self.add(f"{at}.attn_{name}.bias", (rows,))
                self.add(f"{at}.ffn_gate.weight", (MIDDLE, HIDDEN), first)
                self.add(f"{at}.ffn_up.weight", (MIDDLE, HIDDEN), first)
            self.add(f"{at}.attn_output.weight", (HIDDEN, queries), first)
            self.add(f"{at}.ffn_down.weight", (HIDDEN, MIDDLE), second)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(MIDDLE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        if self.architecture in ("llama", "phi3"):
            writer.add_rope_dimension_count(self.head_dim)
        if self.architecture.startswith("gemma") or self.architecture == "qwen3":
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        if self.architecture.startswith("gemma"):
            writer.add_sliding_window(16)
        for key, value in self.metadata.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            (writer.add_uint32 if isinstance(value, int) else add)(key, value)
        self._write_tokenizer(writer)
        for name, (raw, kind) in self.tensors.items():
            writer.add_tensor(name, raw, raw_dtype=None if kind in FLOATS else GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _write_tokenizer(self, writer: GGUFWriter) -> None:
        """The bytes, two merges and control tokens."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        tokens = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
        tokens += ["ab", "cd"]
        tokens += [f"<|{i}|>" for i in range(VOCABULARY - len(tokens))]
        kinds = [TokenType.NORMAL] * 258 + [TokenType.CONTROL] * (VOCABULARY - 258)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_merges(["a b", "c d"])
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(259)
        writer.add_pad_token_id(260)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
