"""The text whose activations decide how a model is quantised, as sequences of token ids of one length."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvboost.errors import ConfigError

SEQUENCE_TOKENS = 512

MIN_TOKENS = 64
"""A text shorter than this says nothing about a model's activations."""

LIMIT_BYTES = 64 << 20
"""Of a calibration file: 16 million tokens, a thousand times what helps."""


def calibration_text(path: str | Path | None) -> str:
    """The file's text, or the built-in one: prose, code, chat, lists and several languages. Raises `ConfigError`."""
    if path is None:
        return files("kvboost.weights.quantize").joinpath("calibration.txt").read_text(encoding="utf-8")
    path = Path(path).expanduser()
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise ConfigError("calibration", f"{path} has more than {LIMIT_BYTES >> 20} MiB. Give a part of it.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("calibration", f"{path} is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError("calibration", f"{path} could not be read ({error.strerror}).") from error


def sequences(tokenizer: Any, text: str, samples: int | None) -> Tensor:
    """int64 `[n, tokens]`: pieces of the text one after the other, at most `samples`. Raises `ConfigError`."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < MIN_TOKENS:
        raise ConfigError(
            "calibration", f"{len(ids)} tokens are too few; give at least {MIN_TOKENS}, better thousands."
        )
    length = min(SEQUENCE_TOKENS, len(ids))
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)[:samples]
