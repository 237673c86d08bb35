"""Compares the sizes a GGUF file claims with the tensors it has, before anything is built from them."""

from __future__ import annotations

import re

from kvboost.errors import ModelLoadError
from kvboost.weights.gguf_cursor import damaged
from kvboost.weights.gguf_reader import GGUFFile

WIDTHS = (
    "embedding_length", "feed_forward_length", "expert_feed_forward_length", "vocab_size", "rope.dimension_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "expert_count", "expert_used_count",
)  # fmt: skip
"""Fields of an architecture that a model turns into sizes. None is larger than the largest dimension of a tensor."""

OPTIONAL = ("expert_count", "expert_used_count", "expert_feed_forward_length", "feed_forward_length", "head_count_kv")
"""Fields that may be 0: for no experts, and layer by layer for what a layer does not have."""

MAX_CONTEXT_TOKENS = 1 << 27

MAX_TOKEN_CHARACTERS = 4096
"""Of one token's text. Tokenizers without merges cut each in two everywhere: the square of it in time and memory."""


def check_sizes(file: GGUFFile) -> None:
    """Raise `ModelLoadError` naming the field for sizes that no tensor of the file bears out.

    Configs allocate lists by the number of layers, and models tables by their widths: a few bytes of a header would
    otherwise be gigabytes.
    """
    architecture = file.architecture
    if not file.tensors:
        damaged(file.path, "tensor_count", "is 0; a model has weights")
    parts = file.metadata.get("split.count", 1)
    if parts != 1:
        raise ModelLoadError(
            f"{file.path}: one of {parts} parts of a model. Join them first: llama-gguf-split --merge FIRST_PART OUT."
        )
    largest = max(max(info.shape) for info in file.tensors.values())
    layers = len({found[1] for name in file.tensors if (found := re.search(r"\bblk\.(\d+)\.", name))})
    _within(file, f"{architecture}.block_count", layers, "layers have tensors")
    for name in WIDTHS:
        _within(file, f"{architecture}.{name}", largest, "is the largest dimension of a tensor")
    for name in ("context_length", "attention.sliding_window"):
        _within(file, f"{architecture}.{name}", MAX_CONTEXT_TOKENS, "tokens are the limit")
    positions = file.tensors.get("position_embd.weight")
    if positions is not None:
        _within(file, f"{architecture}.context_length", positions.shape[0], "positions have an embedding")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    for index, token in enumerate(tokens if isinstance(tokens, list) else ()):
        if len(token) > MAX_TOKEN_CHARACTERS:
            what = f"has {len(token)} characters; {MAX_TOKEN_CHARACTERS} are the limit"
            damaged(file.path, f"tokenizer.ggml.tokens[{index}]", what)


def _within(file: GGUFFile, key: str, most: int, why: str) -> None:
    least = 0 if key.endswith(OPTIONAL) else 1
    value = file.metadata.get(key)
    if value is None:
        return
    numbers = value.tolist() if hasattr(value, "tolist") else [value]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            damaged(file.path, key, f"is {str(number)[:40]}, but {most} {why} and {least} is the least")
