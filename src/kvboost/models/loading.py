"""From a path or Hub id to a Transformers model and tokenizer, with errors that say what is wrong with the files."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvboost.errors import ConfigError, ModelLoadError
from kvboost.models.arena import Arena, Piece, in_order
from kvboost.models.gguf import lent
from kvboost.models.gguf_config import amend
from kvboost.models.limits import refuse_unsupported
from kvboost.weights.checkpoint import load_packed_checkpoint
from kvboost.weights.gguf_checks import check_sizes
from kvboost.weights.gguf_model import load_gguf, unreadable
from kvboost.weights.gguf_reader import GGUFFile, read_gguf
from kvboost.weights.replace import Place, unfilled
from kvboost.weights.rounding import KINDS, round_model
from kvboost.weights.safetensors_reader import read_header, read_index

log = logging.getLogger("kvboost")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """Where a model comes from: `directory_or_id`, and the file inside it, read and checked, when it is GGUF."""

    directory_or_id: str
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the `from_pretrained` of Transformers."""
        return {"gguf_file": self.gguf.path.name} if self.gguf else {}


def locate(path_or_id: str | Path) -> Source:
    """Check local files before anything is loaded. Raises `ModelLoadError`."""
    text = str(path_or_id)
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ModelLoadError(
                f"{text}: no such file. Give the path of a .gguf file, a model directory, or a Hub id."
            )
        file = read_gguf(path)
        check_sizes(file)
        return Source(str(path.parent), file)
    if path.is_dir():
        _check_directory(path)
        return Source(str(path))
    if path.exists():
        raise ModelLoadError(f"{text} is a file; give a model directory, a .gguf file, or a Hub id.")
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text.strip():
        raise ModelLoadError(f"{text!r}: no such directory. Give a model directory, a .gguf file, or a Hub id.")
    return Source(text)


def load_tokenizer(source: Source) -> Any:
    """The tokenizer, or None when the source has none (token ids still work). Raises `ModelLoadError` when damaged."""
    try:
        with lent(source.gguf):
            return AutoTokenizer.from_pretrained(source.directory_or_id, **source.arguments)
    except Exception as error:
        directory = Path(source.directory_or_id)
        if directory.is_dir() and not source.gguf and not any(directory.glob("*token*")):
            return None
        raise ModelLoadError(f"{source.directory_or_id}: the tokenizer could not be loaded: {error}") from error


def load_config(source: Source) -> Any:
    """The config, refused when the architecture is not supported. Raises `ModelLoadError`, `UnsupportedModel`."""
    try:
        with lent(source.gguf):
            config = AutoConfig.from_pretrained(source.directory_or_id, **source.arguments)
        if source.gguf is not None:
            amend(config, source.gguf)
    except ModelLoadError:
        raise
    except Exception as error:
        there = Path(source.directory_or_id).exists()
        what = "the model's config could not be read" if there else "not a directory here, and as a Hub id not read"
        raise ModelLoadError(f"{source.directory_or_id}: {what}: {error}") from error
    refuse_unsupported(config)
    return config


def load_model(
    source: Source, dtype: str | torch.dtype, device: torch.device, weights: str = "auto"
) -> PreTrainedModel:
    """The model on `device`, ready to run. weights: see `EngineConfig`. Raises `ModelLoadError`, `UnsupportedModel`."""
    config = load_config(source)
    chosen = resolve_dtype(dtype, device)
    model = load_placed(source, config, chosen, device, weights)
    if model is not None:
        return model
    if weights in KINDS:
        return round_model(_load_dense(source, config, chosen, device), weights)
    if device.type == "cpu" and source.gguf is None:
        model = _load_into_arena(source, config, chosen)
    return _load_dense(source, config, chosen, device) if model is None else model


def _load_into_arena(source: Source, config: Any, dtype: str | torch.dtype) -> PreTrainedModel | None:
    """A CPU model read straight to where its weights stay: no more than them is taken. None when Transformers has to load
    it, or has to say what is wrong with it."""
    pieces: list[Piece] = []

    def measure(name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        pieces.append(Piece(name, shape, kind))
        return unfilled(name, shape, kind)

    cpu = torch.device("cpu")
    try:
        if load_placed(source, config, dtype, cpu, place=measure) is None:
            return None
        arena = Arena(in_order(pieces))
        return load_placed(source, config, dtype, cpu, place=lambda name, *_: arena.place(name))
    except ModelLoadError:
        return None


def load_plain(source: Source) -> PreTrainedModel:
    """The model in RAM with plain weights, in the dtype of its checkpoint; fp32 where that is packed."""
    config = load_config(source)
    packed = source.gguf is not None or getattr(config, "quantization_config", None)
    dtype = config.dtype if not packed and isinstance(config.dtype, torch.dtype) else torch.float32
    return load_model(source, dtype, torch.device("cpu"), "dense")


def load_placed(
    source: Source,
    config: Any,
    dtype: str | torch.dtype,
    device: torch.device,
    weights: str = "auto",
    place: Place | None = None,
) -> PreTrainedModel | None:
    """The model when it can be filled parameter by parameter; None when Transformers has to load it, which it does faster
    unless something is packed or `place` is given.

    place: gives the memory of a parameter by its name, shape and dtype; where it gives a meta tensor nothing is read.
    """
    if source.gguf is not None and weights not in KINDS:
        reason = unreadable(source.gguf)
        if reason is None:
            model = load_gguf(source.gguf, config, _computed_in(dtype), device, weights == "dense", place)
            return _with_generation_config(source, model)
        log.warning("%s: weights are made dense, because %s.", source.gguf.path.name, reason)
    packed = weights in KINDS or getattr(config, "quantization_config", None)
    if source.gguf is None and (packed or place is not None):
        return load_packed_checkpoint(_directory(source), config, dtype, device, weights, place)
    return None


def source_files(source: Source) -> list[Path]:
    """The files that hold the weights, downloaded first if need be."""
    if source.gguf is not None:
        return [source.gguf.path]
    return sorted(_directory(source).glob("*.safetensors"))


def _directory(source: Source) -> Path:
    """Where the files of a directory or Hub id are, downloaded first if need be. Raises `ModelLoadError`."""
    directory = Path(source.directory_or_id)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.directory_or_id, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise ModelLoadError(f"{source.directory_or_id}: could not be downloaded: {error}") from error


def _load_dense(source: Source, config: Any, dtype: str | torch.dtype, device: torch.device) -> PreTrainedModel:
    # With the config in hand Transformers does not read a GGUF file's metadata (49,152 tokens, seconds) once more.
    arguments: dict[str, Any] = {"config": config, "dtype": dtype, **source.arguments}
    if device.type != "cpu" and importlib.util.find_spec("accelerate"):
        arguments["device_map"] = {"": device}  # straight to the device; without accelerate, by way of host memory
    try:
        with _quiet_load(), lent(source.gguf):
            model, info = AutoModelForCausalLM.from_pretrained(
                source.directory_or_id, output_loading_info=True, **arguments
            )
    except Exception as error:
        raise ModelLoadError(f"{source.directory_or_id}: the weights could not be loaded: {error}") from error
    missing = sorted(info.get("missing_keys", ()))
    mismatched = info.get("mismatched_keys", ())
    if missing or mismatched:
        names = ", ".join([*map(str, missing[:3]), *(str(m) for m in list(mismatched)[:3])])
        raise ModelLoadError(
            f"{source.directory_or_id}: {len(missing)} weights are missing and {len(mismatched)} have a wrong shape "
            f"({names} ...): they would be random. Download the checkpoint again."
        )
    return model.eval().to(device)


def _with_generation_config(source: Source, model: PreTrainedModel) -> PreTrainedModel:
    """The sampling defaults that lie beside the weights, if any; else those of the config stay."""
    if (Path(source.directory_or_id) / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source.directory_or_id)
        except Exception as error:
            raise ModelLoadError(f"{source.directory_or_id}: generation_config.json is damaged: {error}") from error
    return model


def _computed_in(dtype: str | torch.dtype) -> torch.dtype:
    """What a packed model computes in: its checkpoint has no dtype of its own to be `auto`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises `ConfigError`."""
    if str(device) == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", f"got {device!r}: {str(error).splitlines()[0]}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"got {device!r}, but this machine has no usable CUDA device. Use device='cpu'.")
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """`auto` is the checkpoint's own dtype on a GPU; on a CPU bfloat16 where it computes that natively (twice as fast),
    else float32. Raises `ConfigError`."""
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError("dtype", f"got {dtype}; allowed: auto, {', '.join(DTYPES)}.")
        return dtype
    name = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if name == "auto":
        return "auto" if device.type != "cpu" else torch.bfloat16 if cpu_computes_bf16() else torch.float32
    if name not in DTYPES:
        raise ConfigError("dtype", f"got {dtype!r}; allowed: auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def cpu_computes_bf16() -> bool:
    """Whether this processor multiplies bf16 numbers itself (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f" Give the file itself: {path / ggufs[0]}" if ggufs else " It is not a Transformers model directory."
        raise ModelLoadError(f"{path}: there is no config.json.{hint}")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        if any(path.glob("pytorch_model*.bin")):
            return  # Transformers reads these with weights_only=True
        raise ModelLoadError(f"{path}: there are no weights (*.safetensors). Download the checkpoint completely.")
    for file in weights:
        read_header(file)  # a truncated download is found here, in microseconds, instead of deep inside loading
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = set(read_index(index).values())
        absent = sorted(name for name in named if not (path / name).is_file())
        if absent:
            raise ModelLoadError(f"{path}: {len(absent)} weight files are missing, {absent[0]} for one.")


@contextmanager
def _quiet_load() -> Iterator[None]:
    """Progress bars on a terminal only; no advice about dtype or kernels from the library below."""
    import sys

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
