"""Loads a model directory with its linears packed: as its files hold them, or rounded while they are read.

The model is built without weights and filled tensor by tensor, so that memory stays near what the packed model takes.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvboost.errors import ConfigError, ModelLoadError, UnsupportedModel
from kvboost.weights.awq import AwqFormat
from kvboost.weights.compressed import CompressedTensorsFormat, Float8Format
from kvboost.weights.gptq import GptqFormat
from kvboost.weights.packing import Packing, in_pieces
from kvboost.weights.replace import (
    PIECE_BYTES,
    Place,
    fill,
    is_transposed,
    linear_shape,
    linears,
    put_packed,
    same_parameters,
    unpack,
)
from kvboost.weights.rounding import KINDS, round_plan, rounded
from kvboost.weights.safetensors_reader import TensorFiles
from kvboost.weights.skeleton import build_skeleton
from kvboost.weights.stored import FLOATS, Format, PackedRows, StoredLinear

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": AwqFormat,
    "gptq": GptqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Float8Format,
}
"""`quant_method` of a config.json, and who reads it."""

LEFT_TO_TRANSFORMERS = ("mxfp4",)
"""Loaded by Transformers, which needs no further package for them."""

HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|\.attention\.bias$")
"""Tensors that old checkpoints hold and models compute themselves."""


def packed_format(config: Any) -> Format | None:
    """The reader for a config's `quantization_config`; None when its weights are plain or left to Transformers.

    Raises `ModelLoadError` naming a format that is not read.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings: Any = found if isinstance(found, Mapping) else found.to_dict()
    method = str(settings.get("quant_method") or "").lower()
    if method in LEFT_TO_TRANSFORMERS:
        return None
    if method not in FORMATS:
        raise ModelLoadError(
            f"quantization_config: quant_method {method!r} is not read; {', '.join(FORMATS)} are. "
            "Use the model's plain checkpoint with weights='int8' or 'int4', or a GGUF file."
        )
    try:
        return FORMATS[method](settings)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise ModelLoadError(f"quantization_config: damaged ({type(error).__name__}: {error}).") from error


@torch.no_grad()
def load_packed_checkpoint(
    directory: str | Path,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    weights: str = "auto",
    place: Place | None = None,
) -> PreTrainedModel | None:
    """The model of a directory, ready to run on `device`; None when Transformers has to load it (its weights are plain and
    `weights` asks for no rounding, or they are not named as its modules are).

    dtype: of activations, and of what is not packed; "auto" is the config's. weights: auto (packed weights stay packed),
    dense (packed weights are unpacked as they are loaded), int8 or int4 (plain weights are rounded). place: gives the
    memory that weights are filled into; plain ones are then loaded here too. Raises `ModelLoadError` naming file and
    tensor, `ConfigError`, `UnsupportedModel`.
    """
    reader = packed_format(config)
    if reader is not None and weights in KINDS:
        raise ConfigError("weights", f"got {weights!r}, but this checkpoint is packed ({reader.label}). Use 'auto'.")
    directory = Path(directory)
    if reader is None and ((weights not in KINDS and place is None) or not any(directory.glob("*.safetensors"))):
        return None
    files = TensorFiles.open(directory)
    if not isinstance(dtype, torch.dtype):
        dtype = config.dtype if config.dtype in FLOATS else torch.float16
    config = copy.deepcopy(config)
    if reader is not None:
        del config.quantization_config
    try:
        model = build_skeleton(config, dtype, device)
    except UnsupportedModel:
        if reader is None:
            return None
        raise
    filler = _Filler(model, files, device, place, keep=weights != "dense")
    if reader is not None:
        filler.fill(filler.packed_by(reader))
    elif filler.all_named():
        filler.fill(filler.rounded_by(round_plan(model, weights) if weights in KINDS else {}))
    else:
        return None
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.name_or_path = model.config.name_or_path = str(directory)
    return model


Convert = Callable[[str], PackedRows | None]
"""The rows of the parameter of this name; None when it is a plain one."""


class _Filler:
    """Fills a model that has no weights, in the order of its modules: with each layer done, a streamer may take it away.

    `used` are the names of the stored tensors that were read. keep: packed rows stay so; otherwise they are unpacked.
    """

    def __init__(
        self, model: PreTrainedModel, files: TensorFiles, device: torch.device, place: Place | None, keep: bool
    ) -> None:
        self.model, self.files, self.device, self.keep = model, files, device, keep
        self.place: Place = place or (lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        self.used: set[str] = set()
        self._linears = dict(linears(model))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._same = same_parameters(model)
        # A tied tensor may be stored under any of its names.
        self._stored = {
            name: next((n for n in [name, *names] if n in files), None) for names in self._same for name in names
        }

    def all_named(self) -> bool:
        """Whether the files hold every tensor of the model under its name."""
        return all(name is not None for name in self._stored.values())

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Rows of the model's tensor `name` as the files hold it, on the device. Raises `ModelLoadError`."""
        stored = self._stored[name]
        if stored is None:
            raise ModelLoadError(f"{self.files.directory}: tensor {name!r} is missing. Download the checkpoint again.")
        tensor, shape = self.files[stored], self._shapes[name]
        if tensor.shape != shape:
            raise ModelLoadError(f"{tensor} has shape {list(tensor.shape)}; the model needs {list(shape)}.")
        if tensor.dtype not in FLOATS and self._dtype(name) in FLOATS:
            raise ModelLoadError(
                f"{tensor} holds {str(tensor.dtype).removeprefix('torch.')}, and nothing in the checkpoint says what its "
                "values stand for. Download it again."
            )
        self.used.add(stored)
        return self.files.read(stored, start, end).to(self.device)

    def _dtype(self, name: str) -> torch.dtype:
        module, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(module)
        found = owner._parameters.get(leaf)
        return owner.get_buffer(leaf).dtype if found is None else found.dtype

    # -- what is packed ----------------------------------------------------------------------------------------------

    def rounded_by(self, plan: Mapping[str, Packing]) -> Convert:
        def convert(name: str) -> PackedRows | None:
            if name not in plan:
                return None
            if not is_transposed(self.model.get_submodule(name.rpartition(".")[0])):
                return rounded(name, lambda start, end: self.read(name, start, end), plan[name])
            return rounded(name, lambda start, end: self.read(name)[:, start:end].T, plan[name])

        return convert

    def packed_by(self, reader: Format) -> Convert:
        """Raises `ModelLoadError`, `UnsupportedModel` when files and config do not fit together."""
        ending = f".{reader.marker}"
        marked = {name.removesuffix(ending) for name in self.files if name.endswith(ending)}
        if not marked:
            raise ModelLoadError(
                f"{self.files.directory}: config.json says {reader.label}, but no tensor is named *{ending}. "
                "Download the checkpoint again, or remove quantization_config if its weights are plain."
            )
        for name in sorted(marked):
            if name not in self._linears:
                self._refuse(name, reader)
            if reader.is_dense(name):
                raise ModelLoadError(
                    f"{self.files.directory}: {name} is packed, but config.json lists it as not converted. "
                    "Take it off modules_to_not_convert (or ignore)."
                )

        def convert(name: str) -> PackedRows | None:
            module, _, leaf = name.rpartition(".")
            if module not in marked or leaf != "weight":
                return None
            self.used.update(f"{module}.{part}" for part in reader.parts())
            n, k = linear_shape(self._linears[module])
            return reader.rows(StoredLinear(self.files, module, n, k, self.device))

        return convert

    def _refuse(self, name: str, reader: Format) -> None:
        kind = type(self.model).__name__
        if ".experts." in name:
            raise UnsupportedModel(
                f"{self.files.directory}: {name} is packed by {reader.label}, and {kind} keeps its experts in one tensor. "
                "Packed experts are not read. Use a GGUF file, or the plain checkpoint."
            )
        raise ModelLoadError(f"{self.files.directory}: {name} is packed, but {kind} has no plain linear of that name.")

    # -- filling -----------------------------------------------------------------------------------------------------

    def fill(self, convert: Convert) -> None:
        """Fill everything, and account for every stored tensor. Raises `ModelLoadError`."""
        kept = _kept_in_fp32(self.model)
        for names in self._same:
            packed = {name: rows for name in names if (rows := convert(name)) is not None}
            plain = [name for name in names if name not in packed]
            if packed:
                self._fill_packed(list(packed), next(iter(packed.values())))
            if plain:
                dtype = self._dtype(plain[0])
                self._fill_plain(plain, torch.float32 if dtype in FLOATS and kept(plain[0], dtype) else dtype)
        self._check_surplus()

    def _fill_packed(self, names: list[str], packed: PackedRows) -> None:
        name, dtype = names[0], self._dtype(names[0])
        transposed = is_transposed(self.model.get_submodule(name.rpartition(".")[0]))
        n = self._shapes[name][1 if transposed else 0]
        if self.keep:
            rows = self.place(name, (n, packed.packing.row_bytes), torch.uint8)
            put_packed(self.model, names, fill(packed, n, rows), packed.packing, dtype)
            return
        weight = self.place(name, self._shapes[name], dtype)
        if not weight.is_meta:
            unpack(packed, n, weight.T if transposed else weight)
        self._put(names, weight)

    def _fill_plain(self, names: list[str], dtype: torch.dtype) -> None:
        name, shape = names[0], self._shapes[names[0]]
        weight = self.place(name, shape, dtype)
        if weight.is_meta:
            self.used.add(self._stored[name] or name)
        elif not shape:
            weight.copy_(self.read(name))
        else:

            def piece(start: int, end: int) -> None:
                weight[start:end] = self.read(name, start, end)

            in_pieces(shape[0], 4 * max(1, math.prod(shape[1:])), PIECE_BYTES, piece)
        self._put(names, weight)

    def _put(self, names: list[str], tensor: Tensor) -> None:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        for name in names:
            module, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(module)
            if leaf in owner._parameters:
                owner._parameters[leaf] = parameter
            else:
                owner._buffers[leaf] = tensor

    def _check_surplus(self) -> None:
        ignored = [re.compile(pattern) for pattern in self.model._keys_to_ignore_on_load_unexpected or ()]
        known = {name for name in self._stored if name in self.files}  # other names of tied tensors
        for name in self.files:
            if name in self.used or name in known or HARMLESS.search(name) or any(p.search(name) for p in ignored):
                continue
            if (
                name.endswith(".bias")
                and name.removesuffix(".bias") in self._linears
                and not self.files.read(name).any()
            ):
                continue  # some GPTQ writers add a bias of zeros to every linear
            raise ModelLoadError(
                f"{self.files[name]} belongs to nothing in {type(self.model).__name__}: the checkpoint and its config.json "
                "do not fit together. Download it again."
            )


def _kept_in_fp32(model: PreTrainedModel) -> Callable[[str, torch.dtype], bool]:
    """Which parameters a model wants in fp32, given the dtype of the others."""
    strict = tuple(model._keep_in_fp32_modules_strict or ())
    in_half = tuple(model._keep_in_fp32_modules or ())

    def kept(name: str, dtype: torch.dtype) -> bool:
        names = strict + in_half if dtype == torch.float16 else strict
        return any(f".{part}." in f".{name}." for part in names)

    return kept
