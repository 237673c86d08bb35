"""A Transformers model whose matrices are the rows of a GGUF file, packed as they are.

The model is built without weights, its parameters are matched with the file's tensors by the name map of the `gguf`
package, and linears and embeddings give way to modules that compute with packed rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.errors import ModelLoadError
from kvboost.models.arena import Arena, Piece, in_order
from kvboost.weights.gguf_reader import GGUFFile, TensorData, TensorInfo
from kvboost.weights.gguf_tensors import fill_dense, fill_packed, packing_of, readable
from kvboost.weights.gguf_types import FLOATS
from kvboost.weights.packing import Packing
from kvboost.weights.replace import Place, packed_twin
from kvboost.weights.skeleton import Slots, build_skeleton

log = logging.getLogger("kvboost")


@dataclass(frozen=True)
class Family:
    """What llama.cpp's converter does to the weights of an architecture, to be undone.

    permuted: the rows of q and k are interleaved pairs of each head. norms_plus_one: norm weights are stored as w + 1.
    """

    permuted: bool = False
    norms_plus_one: bool = False


FAMILIES = {
    "llama": Family(permuted=True), "qwen2": Family(), "qwen3": Family(), "phi3": Family(),
    "gemma2": Family(norms_plus_one=True), "gemma3": Family(norms_plus_one=True),
}  # fmt: skip
"""By `general.architecture`. Mistral's files are of the architecture llama."""

IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no parameters: `models.gguf_config` reads them."""


@dataclass(frozen=True)
class Entry:
    """One parameter and where it comes from. packing: None for what becomes dense."""

    name: str
    info: TensorInfo
    packing: Packing | None
    heads: int = 0
    """Of rows to be put back in order; 0: they are in order."""
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.info.rows, self.packing.row_bytes) if self.packing else self.info.shape

    def kind(self, dtype: torch.dtype) -> torch.dtype:
        """What its parameter holds in a model that computes in `dtype`."""
        return torch.uint8 if self.packing else dtype


def unreadable(file: GGUFFile) -> str | None:
    """Why a file's weights are left to Transformers, which makes them dense; None when they need not be."""
    if file.architecture not in FAMILIES:
        return f"the architecture {file.architecture} is not among {', '.join(FAMILIES)}"
    if any("_exps." in name for name in file.tensors):
        return "its experts are stacked matrices (mixture of experts)"
    return None


@torch.no_grad()
def load_gguf(
    file: GGUFFile,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    dense: bool = False,
    place: Place | None = None,
) -> PreTrainedModel:
    """The model of `file` on `device`, computing in `dtype`; its config is `config`.

    dense: unpack all weights into `dtype`. place: gives the memory of each parameter, asked in the order of the layers;
    by default one arena on a CPU. Where it gives a meta tensor nothing is read. Raises `ModelLoadError` naming the
    tensors that are missing, left over, or of a wrong shape or type.
    """
    try:
        model = build_skeleton(config, dtype, device)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a model's constructor says about sizes that do not fit each other
        raise ModelLoadError(f"{file.path}: its metadata make no model: {error}") from error
    slots = Slots(model)
    entries = _match(file, model, slots, dense)
    place = place or _memory(entries, dtype, device)
    with file.open() as data:
        for entry in entries:
            out = place(entry.name, entry.shape, entry.kind(dtype))
            if not out.is_meta:
                _fill(data, entry, out)
            _install(slots, entry, nn.Parameter(out, requires_grad=False), dtype)
    _report(file, entries, dense)
    return model


def _fill(data: TensorData, entry: Entry, out: Tensor) -> None:
    target = torch.empty_like(out, device="cpu") if entry.heads else out
    if entry.packing:
        fill_packed(data, entry.info, entry.packing, target)
    else:
        fill_dense(data, entry.info, target, entry.offset)
    if entry.heads:
        _reorder(target, out, entry.heads)


def _match(file: GGUFFile, model: PreTrainedModel, slots: Slots, dense: bool) -> list[Entry]:
    """An entry for each parameter, in the order in which they are laid out."""
    family = FAMILIES[file.architecture]
    names = _file_names(file, model, slots)
    missing = [f"{ours} ({theirs})" for ours, theirs in names.items() if theirs not in file.tensors]
    surplus = sorted(set(file.tensors) - set(names.values()) - set(IGNORED))
    for problem, found in (("are missing", missing), ("belong to no module of the model", surplus)):
        if found:
            more = " ..." if len(found) > 3 else ""
            raise ModelLoadError(
                f"{file.path}: {len(found)} tensors {problem}: {', '.join(found[:3])}{more}. "
                f"The file does not fit its architecture {file.architecture}; download it again."
            )
    entries: dict[str, Entry] = {}
    for name, theirs in names.items():
        info = file.tensors[theirs]
        wanted = tuple(slots.parameter(name).shape)
        if info.shape != wanted:
            raise ModelLoadError(
                f"{file.path}: tensor {theirs!r} has shape {list(info.shape)}, but the model needs {list(wanted)} "
                f"({name}): the sizes in the file's metadata are not those of its tensors. Download it again."
            )
        if not readable(info):
            raise ModelLoadError(
                f"{file.path}: tensor {theirs!r} is {info.type.name}, which no weight can be. Use another file."
            )
        entries[name] = _entry(model, slots, family, name, info, dense)
    return [entries[piece.name] for piece in in_order(_pieces(entries.values(), model.dtype))]


def _pieces(entries: Iterable[Entry], dtype: torch.dtype) -> list[Piece]:
    return [Piece(entry.name, entry.shape, entry.kind(dtype)) for entry in entries]


def _file_names(file: GGUFFile, model: PreTrainedModel, slots: Slots) -> dict[str, str]:
    """Our name of each parameter to the file's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(arch, model.config.num_hidden_layers)
    names = {}
    for name in slots.names:
        stem, _, suffix = name.rpartition(".")
        theirs = known.get_name(stem)
        names[name] = f"{theirs}.{suffix}" if theirs else f"no GGUF name for {name}"
    return names


def _entry(model: PreTrainedModel, slots: Slots, family: Family, name: str, info: TensorInfo, dense: bool) -> Entry:
    packing = packing_of(info) if slots.packable(name) and not dense else None
    heads = 0
    if family.permuted and ".attn_q." in info.name:
        heads = model.config.num_attention_heads
    elif family.permuted and ".attn_k." in info.name:
        heads = model.config.num_key_value_heads
    offset = -1.0 if family.norms_plus_one and "norm.weight" in info.name else 0.0
    return Entry(name, info, packing, heads, offset)


def _reorder(rows: Tensor, out: Tensor, heads: int) -> None:
    """From pairs (0, half), (1, half + 1), ... of each head to its first half, then its second."""
    rest = rows.shape[1:]
    out.view(heads, 2, -1, *rest).copy_(rows.view(heads, -1, 2, *rest).transpose(1, 2))


def _memory(entries: list[Entry], dtype: torch.dtype, device: torch.device) -> Place:
    if device.type != "cpu":
        return lambda name, shape, kind: torch.empty(shape, dtype=kind, device=device)
    arena = Arena(_pieces(entries, dtype))
    return lambda name, shape, kind: arena.place(name)


def _install(slots: Slots, entry: Entry, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    packing = entry.packing
    if packing is None:
        slots.put(entry.name, parameter)
    else:
        slots.replace(entry.name, lambda module: packed_twin(module, parameter, packing, dtype))


def _report(file: GGUFFile, entries: list[Entry], dense: bool) -> None:
    packed = [entry for entry in entries if entry.packing]
    unpacked = [entry.info.type.name for entry in entries if not entry.packing and entry.info.type.name not in FLOATS]
    parts = []
    if packed:
        held = sum(entry.shape[0] * entry.shape[1] for entry in packed)
        weights = sum(entry.info.rows * entry.info.shape[-1] for entry in packed)
        parts.append(
            f"{len(packed)} matrices stay packed ({held / 2**20:,.0f} MiB, {held * 8 / weights:.2f} bits per weight)"
        )
    if unpacked:
        why = "as asked" if dense else "their types or modules are not kept packed"
        parts.append(f"{len(unpacked)} tensors ({', '.join(sorted(set(unpacked)))}) are made dense, {why}")
    log.info("%s: %s.", file.path.name, "; ".join(parts) or "its weights are plain")
