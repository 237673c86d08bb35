"""Models larger than their memory: measures a model, plans, loads each parameter to its place and attaches the streamer.

Files are gone through twice: once without filling anything, which tells the exact size of every layer, and once to
fill. A layer that goes to a drive is written as soon as it is complete; the model is never whole in RAM. What
Transformers itself has to load (see `models/loading.py`), or is in hand, is whole in RAM once and is moved from there.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost.cache.pages import zeroed_buffer
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.models.fingerprint import weights_fingerprint
from kvboost.models.limits import text_config
from kvboost.models.loading import (
    Source,
    load_config,
    load_model,
    load_placed,
    locate,
    resolve_device,
    resolve_dtype,
    source_files,
)
from kvboost.weights.budget import budget_of
from kvboost.weights.disk import DiskStore, cache_directory, measure_disk
from kvboost.weights.feeds import Feed, ThreadFeed
from kvboost.weights.flat import FlatLayout, Owned, owned_by_layer
from kvboost.weights.gpu_feeds import CopyFeed, RingFeed
from kvboost.weights.placement import Home, Placement, Staging, in_arena, on_device
from kvboost.weights.plan import Demand, StreamPlan, plan_streaming
from kvboost.weights.replace import unfilled
from kvboost.weights.store import HostArena, measure_bus, readable_in_place
from kvboost.weights.streamer import Seat, Streamer

log = logging.getLogger("kvboost")

FITS_SHARE = 0.8
"""A model whose files take less than this share of a GPU's free memory is loaded whole: KV and workspace find room."""


def must_stream(config: EngineConfig, source: Source, device: torch.device) -> bool:
    """Whether a model is planned before it is loaded: a budget is set, or its files are too large for the GPU."""
    if config.weights_budget_gib is not None or config.vram_budget_gib is not None:
        return True
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return sum(file.stat().st_size for file in source_files(source)) > free * FITS_SHARE


def load_streaming(
    source: Source, dtype: str | torch.dtype, device: torch.device, config: EngineConfig
) -> PreTrainedModel:
    """The model, with as many layers resident as its budget holds and the others streamed; all, when all fit.

    Raises `ConfigError` naming the budget and the least one that works, `ModelLoadError`, `UnsupportedModel`.
    """
    model_config = load_config(source)
    chosen = resolve_dtype(dtype, device)
    model = load_in_parts(
        partial(load_placed, source, model_config, chosen, device, config.weights),
        lambda parts: _source_key(source, parts, chosen, config.weights),
        config,
        device,
    )
    if model is not None:
        return model
    log.warning("%s is loaded whole before its layers are moved out.", source.directory_or_id)
    return stream_in_hand(load_model(source, dtype, torch.device("cpu"), config.weights), config, device)


def describe_streaming(path: str, config: EngineConfig) -> str:
    """What would be decided for a model on this machine; nothing is loaded. Errors as `load_streaming`."""
    source, device = locate(path), resolve_device("auto")
    dtype = resolve_dtype("auto", device)
    measured = load_placed(source, load_config(source), dtype, device, config.weights, unfilled)
    if measured is None:
        return "its sizes are known once it is loaded: Transformers has to load it"
    return _Setting(Parts(measured, config), config, device, "", trust=False).plan.describe()


def load_in_parts(
    load: Callable[..., PreTrainedModel | None], key: Callable[[Parts], str], config: EngineConfig, device: torch.device
) -> PreTrainedModel | None:
    """The model that `load(place=...)` makes, its parameters in the memory that `place` gives. It is called twice, first
    with meta tensors that are not to be filled; None when it cannot do that.

    key: equal exactly when all weights are: layer files of that key on a drive are taken for them.
    """
    measured = load(place=unfilled)
    if measured is None:
        return None
    parts = Parts(measured, config)
    setting = _Setting(parts, config, device, key(parts), trust=True)
    setting.announce()
    placement = setting.placement()
    model = load(place=placement.place)
    assert model is not None
    placement.finish()
    setting.attach(Parts(model, config))
    return model


def stream_in_hand(model: PreTrainedModel, config: EngineConfig, device: torch.device | None = None) -> PreTrainedModel:
    """The same for a model in RAM: its layers are moved out one by one. device: where it shall run."""
    device = device or (model.device if config.vram_budget_gib is None else torch.device("cuda", 0))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("vram_budget_gib", "this machine has no usable CUDA device. Use weights_budget_gib.")
    parts = Parts(model, config)
    setting = _Setting(parts, config, device, weights_fingerprint(model).hex(), trust=False)
    setting.announce()
    placement = setting.placement()
    with torch.no_grad():
        for o in (*parts.rest, *(o for owned in parts.by_layer for o in owned)):
            view = placement.place(o.name, tuple(o.parameter.shape), o.parameter.dtype)
            o.become(view.copy_(o.parameter))
        placement.finish()
    for module in model.modules():
        module._buffers.update({name: b if b is None else b.to(device) for name, b in module._buffers.items()})
    setting.attach(parts)
    return model


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module] | None:
    """The list of the model's `count` decoder layers."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    found = next(lists, None)
    return None if found is None else list(found)


class Parts:
    """A model by what is planned: its layers and what each of them owns, and the rest."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        field = "weights_budget_gib" if config.vram_budget_gib is None else "vram_budget_gib"
        layers = decoder_layers(model, text_config(model.config).num_hidden_layers)
        if layers is None:
            raise ConfigError(field, f"no list of decoder layers was found in {type(model).__name__}, so it cannot be "
                              "streamed. Leave the budget out.")  # fmt: skip
        self.model, self.layers = model, layers
        self.by_layer, self.rest = owned_by_layer(model, layers)
        self.layouts = [FlatLayout.of(owned) for owned in self.by_layer]

    @property
    def sizes(self) -> list[int]:
        return [layout.nbytes for layout in self.layouts]

    def table(self) -> list[Owned]:
        """The token embedding, when nothing else reads it: a few of its rows are needed in a step."""
        module = self.model.get_input_embeddings()
        return [o for o in self.rest if len(o.places) == 1 and o.places[0] == (module, "weight")]


class _Setting:
    """What was decided for one model, and the memories made for it. In this order: `placement`, loading, `attach`."""

    def __init__(self, parts: Parts, config: EngineConfig, device: torch.device, key: str, *, trust: bool) -> None:
        """key: names the weights among the files of a drive; with `trust`, files of that key hold these weights."""
        self._parts, self._device, self._key, self._trust = parts, device, key, trust
        self.budget = budget_of(config, parts.model.config, parts.model.dtype, device)
        on_gpu = device.type == "cuda"
        self._table = parts.table() if on_gpu and readable_in_place(device) else []
        self._rest = [o for o in parts.rest if o not in self._table]
        self._arena: HostArena | None = None
        self._table_arena: HostArena | None = None
        self._disk: DiskStore | None = None
        self.plan = self._plan()
        streamed = list(self.plan.streamed)
        self._in_ram = _first_that_fit(streamed, parts.sizes, self.budget.host_bytes or 0)
        self._on_disk = [layer for layer in streamed if layer not in self._in_ram]

    def _plan(self) -> StreamPlan:
        parts, budget = self._parts, self.budget
        table = FlatLayout.of(self._table).nbytes if self._table else 0
        rest = FlatLayout.of(self._rest).nbytes
        whole = Demand(tuple(parts.sizes), rest + table, budget.kv_bytes, budget.workspace_bytes)
        if whole.whole_bytes <= budget.nbytes:
            self._table, self._rest = [], parts.rest
            return plan_streaming(whole, budget.nbytes, budget.field)
        demand = Demand(tuple(parts.sizes), rest, budget.kv_bytes, budget.workspace_bytes, table)
        plan = plan_streaming(demand, budget.nbytes, budget.field)  # an error comes before anything is measured
        if budget.host_bytes is not None and len(_first_that_fit(plan.streamed, parts.sizes, budget.host_bytes)) == len(
            plan.streamed
        ):
            return plan_streaming(demand, budget.nbytes, budget.field, "RAM", measure_bus(self._device))
        return plan_streaming(demand, budget.nbytes, budget.field, "disk", measure_disk(cache_directory()))

    def announce(self) -> None:
        """Say what was decided: in the log, and on a terminal."""
        if not self.plan.streamed:
            return
        log.info("%s", self.plan.describe())
        if sys.stderr.isatty():
            print(self.plan.describe(), file=sys.stderr, flush=True)

    # -- memory for what is loaded -----------------------------------------------------------------------------------

    def placement(self) -> Placement:
        parts, device = self._parts, self._device
        sizes, pin = parts.sizes, device.type == "cuda"
        placement = Placement(device)
        stay = on_device(device)
        if self._table:
            layout = FlatLayout.of(self._table)
            self._table_arena = HostArena([layout.nbytes], pin=True)
            placement.add(self._table, Home(layout, in_arena(self._table_arena, 0)))
        placement.add(self._rest, Home(FlatLayout.of(self._rest), stay))
        for layer in self.plan.resident:
            placement.add(parts.by_layer[layer], Home(parts.layouts[layer], stay))
        if self._in_ram:
            self._arena = HostArena([sizes[layer] for layer in self._in_ram], pin=pin)
            for i, layer in enumerate(self._in_ram):
                placement.add(parts.by_layer[layer], Home(parts.layouts[layer], in_arena(self._arena, i)))
        if self._on_disk:
            self._add_files(placement)
        return placement

    def _add_files(self, placement: Placement) -> None:
        sizes = self._parts.sizes
        disk = self._disk = DiskStore(cache_directory(), self._key, sizes, _name_of(self._parts.model))
        missing = set(disk.missing(self._on_disk))
        disk.require_room(sorted(missing))
        staging = Staging(max(sizes[layer] for layer in self._on_disk))
        for layer in self._on_disk:
            fill = layer in missing or not self._trust
            home = Home(self._parts.layouts[layer], staging.take if fill else None, _writer(disk, layer, staging))
            placement.add(self._parts.by_layer[layer], home)

    # -- the model, once it is loaded --------------------------------------------------------------------------------

    def attach(self, parts: Parts) -> None:
        """parts: of the filled model; of streamed layers the parameters are still anywhere."""
        plan, device = self.plan, self._device
        if self._table_arena is not None:
            where = self._table_arena.on_gpu(0, device)
            parts.table()[0].become(FlatLayout.of(self._table).pieces[0].view(where))
            weakref.finalize(parts.model, self._table_arena.close)
        if not plan.streamed:
            return
        slots = [_slot(plan.slot_bytes, device) for _ in range(plan.slots)]
        seats = []
        for layer, slot in zip(plan.streamed, plan.slot_of, strict=True):
            owned = {o.name: o for o in parts.by_layer[layer]}
            found = [owned[piece.name].become(piece.view(slots[slot])) for piece in parts.layouts[layer].pieces]
            seats.append(Seat(slot, weakref.ref(found[0]), found[0].data_ptr()))
        streamer = Streamer(plan, self.budget, seats, self._feed(slots))
        streamer.attach(parts.model, [parts.layers[layer] for layer in plan.streamed])

    def _feed(self, slots: Sequence[Tensor]) -> Feed:
        layers = self.plan.streamed
        sizes = [self._parts.sizes[layer] for layer in layers]
        arena, disk = self._arena, self._disk
        if disk is None:
            assert arena is not None
            if self._device.type == "cuda":
                return CopyFeed(arena, slots, sizes)
            return ThreadFeed(arena.read_into, slots, sizes, arena.close)

        def read(place: int, out: Tensor) -> None:
            disk.read_into(layers[place], out)

        if self._device.type != "cuda":
            return ThreadFeed(read, slots, sizes, disk.close)
        ram: dict[int, Tensor] = {}
        if arena is not None:
            ram = {layers.index(layer): arena.layer(i) for i, layer in enumerate(self._in_ram)}

        def close() -> None:
            disk.close()
            if arena is not None:
                arena.close()

        return RingFeed(read, slots, sizes, close, ram)


def _writer(disk: DiskStore, layer: int, staging: Staging) -> Callable[[Tensor], None]:
    def write(buffer: Tensor) -> None:
        disk.write(layer, buffer)
        staging.give_back(buffer)

    return write


def _slot(size: int, device: torch.device) -> Tensor:
    return zeroed_buffer(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)


def _name_of(model: Any) -> str:
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def _first_that_fit(layers: Sequence[int], sizes: Sequence[int], nbytes: int) -> list[int]:
    kept, left = [], nbytes
    for layer in layers:
        left -= sizes[layer]
        if left < 0:
            break
        kept.append(layer)
    return kept


def _source_key(source: Source, parts: Parts, dtype: Any, weights: str) -> str:
    """Equal exactly when files, options and layouts are: what the bytes of every layer follow from."""
    files = [(str(Path(file).resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in source_files(source)]
    pieces = [(p.name, p.shape, str(p.dtype), p.offset) for layout in parts.layouts for p in layout.pieces]
    return blake2b(repr((files, str(dtype), weights, pieces)).encode(), digest_size=32).hexdigest()
