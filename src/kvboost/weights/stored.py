"""What a reader of a packed format is given, and what it gives: one linear as a checkpoint stores it, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from kvboost.errors import ModelLoadError
from kvboost.weights.packing import Packing
from kvboost.weights.safetensors_reader import TensorFiles

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedRows:
    """A weight on its way from a file: `rows(start, end)` gives uint8 `[end - start, packing.row_bytes]`.

    start is a multiple of 32; end too, or the last row. Nothing larger than the stored tensors is held in between.
    """

    packing: Packing
    rows: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class StoredLinear:
    """The tensors of the linear `name` (`[n, k]`: n outputs, k inputs) in a checkpoint, each checked when it is read."""

    files: TensorFiles
    name: str
    n: int
    k: int
    device: torch.device

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.files

    def shape(self, part: str) -> tuple[int, ...]:
        """Raises `ModelLoadError` when the tensor is missing."""
        name = f"{self.name}.{part}"
        if name not in self.files:
            raise ModelLoadError(f"{self.files.directory}: tensor {name!r} is missing. Download the checkpoint again.")
        return self.files[name].shape

    def read(self, part: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """The tensor `part` on the device. Raises `ModelLoadError` unless it has one of the dtypes and shapes."""
        name = f"{self.name}.{part}"
        found, stored = self.shape(part), self.files[name]
        if found not in shapes:
            wanted = " or ".join(map(str, map(list, shapes)))
            raise ModelLoadError(f"{stored} has shape {list(found)}; {wanted} is expected of {self.k} to {self.n}.")
        if stored.dtype not in dtypes:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ModelLoadError(f"{stored} has dtype {str(stored.dtype).removeprefix('torch.')}; allowed: {wanted}.")
        return self.files.read(name).to(self.device)

    def scales(self, part: str, *shapes: tuple[int, ...]) -> Tensor:
        """Scales as stored, all finite: one that is not would make every product NaN."""
        scales = self.read(part, FLOATS, *shapes)
        if not bool(torch.isfinite(scales).all()):
            raise ModelLoadError(f"{self.files[f'{self.name}.{part}']} has values that are not finite.")
        return scales

    def packing(self, *args: Any, **kwargs: Any) -> Packing:
        """`Packing(...)`, or an error that names the linear."""
        try:
            return Packing(*args, **kwargs)
        except ValueError as error:
            self.fail(f"cannot be kept packed: {error}")

    def groups(self, count: int) -> int:
        """Weights in a group when there are `count` groups. Raises `ModelLoadError` unless that divides k."""
        if count < 1 or self.k % count:
            self.fail(f"{count} groups do not divide its {self.k} inputs evenly")
        return self.k // count

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.files.directory}: {self.name}: {what.rstrip('.')}.")


class Format(Protocol):
    """How some quantiser stores linears.

    label: what users call it. marker: a tensor that each packed linear has, and no other module.
    """

    label: str
    marker: str

    def is_dense(self, module: str) -> bool:
        """Whether the config says that the linear of this name was left as it was."""
        ...

    def rows(self, linear: StoredLinear) -> PackedRows:
        """Raises `ModelLoadError` naming the tensor at fault."""
        ...

    def parts(self) -> tuple[str, ...]:
        """All tensors a packed linear may have, beside its bias."""
        ...


def group_size(value: Any) -> int:
    """A config's `group_size`; -1 is all inputs. Raises `ModelLoadError`."""
    if type(value) is not int or not (value == -1 or value > 0):
        raise ModelLoadError(f"quantization_config: group_size {value!r}; 32, 64, 128 and -1 are usual.")
    return value


def scale_bytes(scales: Tensor) -> int:
    """2 when fp16 holds these scales exactly, else 4: bf16 has a wider range, fp32 more digits."""
    if scales.dtype == torch.float16:
        return 2
    return 2 if bool((scales.half().to(scales.dtype) == scales).all()) else 4


def nibbles(words: Tensor, bits: int) -> Tensor:
    """int32 `[..., m]` to the uint8 values in it, low bits first: `[..., m * 32 / bits]`, 4 or 8 bits each."""
    raw = words.contiguous().view(torch.uint8)  # little-endian, as every machine torch runs on
    if bits == 8:
        return raw
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def listed(module: str, names: Collection[str]) -> bool:
    """Whether `names` (whole names, their ends or parts between dots) name this module, as quantisers read such lists."""
    return any(module == name or module.endswith(f".{name}") or f".{name}." in f".{module}." for name in names)
