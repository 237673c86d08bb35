"""`kvboost quantize`: a plain model to an AWQ checkpoint, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.errors import ConfigError, ModelLoadError
from kvboost.models.fingerprint import weights_fingerprint
from kvboost.weights.awq import quantization_config
from kvboost.weights.quantize.awq import packed_tensors, scale_and_clip
from kvboost.weights.quantize.blocks import Calls, check_blocks, find_blocks, quantisable
from kvboost.weights.quantize.calibration import calibration_text, sequences
from kvboost.weights.quantize.output import Output

METHODS = ("awq", "rtn")
GROUP_SIZES = (128, 64, 32)

PLAN_VERSION = 1
"""Raised when parts of an older run would no longer be what a new run makes."""


@dataclass(frozen=True)
class Settings:
    """method: awq, or rtn (round to nearest: nothing is moved or cut). group_size: weights that share a scale.
    calibration: a text file; None is the built-in text. samples: most sequences of 512 tokens to use; None is all.

    Raises `ConfigError`.
    """

    method: str = "awq"
    group_size: int = 128
    calibration: str | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError("method", f"got {self.method!r}; allowed: {', '.join(METHODS)}.")
        if self.group_size not in GROUP_SIZES:
            raise ConfigError("group_size", f"got {self.group_size}; allowed: {', '.join(map(str, GROUP_SIZES))}.")
        if self.samples is not None and self.samples < 1:
            raise ConfigError("samples", f"got {self.samples}; at least 1 sequence is needed.")


def quantize(
    model: PreTrainedModel,
    tokenizer: Any,
    out: str | Path,
    settings: Settings,
    device: torch.device,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write `model`, whose weights are plain, to the directory `out`; its layers are used up on the way.

    tokenizer: needed for `awq`, and saved with the model. device: where a layer is worked on, in fp32. progress: called
    with layers done and layers in all. A run that was interrupted goes on where it stopped. Raises `ConfigError`,
    `UnsupportedModel`.
    """
    output = Output(out, overwrite)
    dense = check_blocks(model, settings.group_size)
    ids = None
    if settings.method == "awq":
        if tokenizer is None:
            raise ConfigError("method", "awq needs the model's tokenizer to read calibration text. Use method rtn.")
        ids = sequences(tokenizer, calibration_text(settings.calibration), settings.samples)
    work = _Work(model, settings, device, set(dense), ids)
    total = len(work.blocks)
    done = min(output.begin(_plan(model, settings, ids)), total)
    for index in range(total):
        progress(index, total)
        if index < done:
            work.skip(index, needed=done < total)
        else:
            output.write_part(index, work.quantise(index))
    output.write_part(total, work.rest())
    progress(total, total)
    texts = {
        "config.json": _config(model, settings.group_size, dense, work.dtype),
        # Not its own `save_pretrained`, which refuses settings that its own `from_pretrained` has let pass.
        "generation_config.json": json.loads(model.generation_config.to_json_string(use_diff=True)),
    }
    output.finish(total + 1, texts, None if tokenizer is None else tokenizer.save_pretrained)
    return output.path


class _Work:
    """The layers of a model, worked on in order. `hidden` is the input of the next one, computed by plain weights."""

    def __init__(
        self, model: PreTrainedModel, settings: Settings, device: torch.device, dense: set[str], ids: Tensor | None
    ) -> None:
        self.model, self.settings, self.device, self.dense = model, settings, device, dense
        self.prefix, self.blocks = find_blocks(model)
        self.dtype = model.dtype if model.dtype in (torch.bfloat16, torch.float16) else torch.float16
        """Of everything that is not quantised."""
        self.calls = None if ids is None else Calls(model, self.blocks, ids)
        self.hidden = [] if self.calls is None else self.calls.hidden
        outside = {
            name: tensor for name, tensor in model.state_dict().items() if not name.startswith(f"{self.prefix}.")
        }
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self._outside = {name: tensor for name, tensor in outside.items() if name not in tied}

    @torch.no_grad()
    def skip(self, index: int, needed: bool) -> None:
        """Go past a layer whose part is there already. needed: whether a later one wants its output."""
        if needed and self.calls is not None:
            block = self._lift(index)
            self.hidden = self._outputs(block, index)
        self.blocks[index].to("meta")

    @torch.no_grad()
    def quantise(self, index: int) -> dict[str, Tensor]:
        """The tensors of one layer as the file has them."""
        block = self._lift(index)
        named = [(name, m) for name, m in quantisable(block) if f"{self.prefix}.{index}.{name}" not in self.dense]
        ranges: dict[str, tuple[Tensor, Tensor]] = {}
        if self.calls is not None:
            following = self._outputs(block, index)
            ranges = scale_and_clip(
                block, named, partial(self._on_device, block, index), self.dtype, self.settings.group_size
            )
            self.hidden = following
        tensors: dict[str, Tensor] = {}
        for name, module in named:
            full = f"{self.prefix}.{index}.{name}"
            tensors |= packed_tensors(full, module.get_parameter("weight"), self.settings.group_size, ranges.get(name))
        packed = {f"{name}.weight" for name, _ in named}
        for name, tensor in block.state_dict().items():
            if name not in packed:
                full = f"{self.prefix}.{index}.{name}"
                tensors[full] = self._plain(full, tensor)
        block.to("meta")
        return tensors

    def rest(self) -> dict[str, Tensor]:
        return {name: self._plain(name, tensor) for name, tensor in self._outside.items()}

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu().clone()
        stored = tensor.to(self.dtype)
        if bool((torch.isinf(stored) & ~torch.isinf(tensor)).any()):
            raise ModelLoadError(
                f"{name} has values beyond {self.dtype}'s range. Quantise a bfloat16 checkpoint instead."
            )
        return stored.cpu().clone()

    def _lift(self, index: int) -> nn.Module:
        block: nn.Module = self.blocks[index].to(self.device, torch.float32).requires_grad_(False)
        return block

    def _on_device(self, block: nn.Module, index: int, which: slice) -> list[Tensor]:
        assert self.calls is not None
        return [self.calls.run(block, index, hidden, self.device) for hidden in self.hidden[which]]

    def _outputs(self, block: nn.Module, index: int) -> list[Tensor]:
        return [out.cpu() for out in self._on_device(block, index, slice(None))]


def _plan(model: PreTrainedModel, settings: Settings, ids: Tensor | None) -> dict[str, Any]:
    """What must be equal for parts of an interrupted run to be used."""
    text = b"" if ids is None else ids.numpy().tobytes()
    return {
        "version": PLAN_VERSION,
        "method": settings.method,
        "group_size": settings.group_size,
        "sequences": blake2b(text, digest_size=16).hexdigest(),
        "weights": weights_fingerprint(model).hex(),
        "dtype": str(model.dtype),
    }


def _config(model: PreTrainedModel, group: int, dense: list[str], dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = quantization_config(group, dense)
    return config
