"""From a path or Hub id to a Transformers model and tokenizer, with errors that say what is wrong with the files."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvboost.errors import ConfigError, ModelLoadError
from kvboost.models.limits import refuse_unsupported

log = logging.getLogger("kvboost")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SAFETENSORS_HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit. A larger header length means the file is not safetensors."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: `directory_or_id`, and the file inside it when it is GGUF."""

    directory_or_id: str
    gguf_file: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the `from_pretrained` of Transformers."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def locate(path_or_id: str | Path) -> Source:
    """Check local files before anything is loaded. Raises `ModelLoadError`."""
    text = str(path_or_id)
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ModelLoadError(
                f"{text}: no such file. Give the path of a .gguf file, a model directory, or a Hub id."
            )
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{text}: not a GGUF file (wrong magic bytes). Download it again.")
        return Source(str(path.parent), path.name)
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
        return AutoTokenizer.from_pretrained(source.directory_or_id, **source.arguments)
    except Exception as error:
        directory = Path(source.directory_or_id)
        if directory.is_dir() and not source.gguf_file and not any(directory.glob("*token*")):
            return None
        raise ModelLoadError(f"{source.directory_or_id}: the tokenizer could not be loaded: {error}") from error


def load_config(source: Source) -> Any:
    """The config, refused when the architecture is not supported. Raises `ModelLoadError`, `UnsupportedModel`."""
    try:
        config = AutoConfig.from_pretrained(source.directory_or_id, **source.arguments)
    except Exception as error:
        raise ModelLoadError(f"{source.directory_or_id}: the model's config could not be read: {error}") from error
    refuse_unsupported(config)
    return config


def load_model(source: Source, dtype: str | torch.dtype, device: torch.device) -> PreTrainedModel:
    """The weights on `device`, ready to run. Raises `ModelLoadError`, `UnsupportedModel`."""
    config = load_config(source)
    # With the config in hand Transformers does not read a GGUF file's metadata (49,152 tokens, seconds) once more.
    arguments: dict[str, Any] = {"config": config, "dtype": resolve_dtype(dtype, device), **source.arguments}
    if device.type != "cpu" and importlib.util.find_spec("accelerate"):
        arguments["device_map"] = {"": device}  # straight to the device; without accelerate, by way of host memory
    try:
        with _quiet_load():
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
        _check_safetensors(file)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index}: damaged ({error}). Download it again.") from error
        absent = sorted(str(name) for name in named if not (path / str(name)).is_file())
        if absent:
            raise ModelLoadError(f"{path}: {len(absent)} weight files are missing, {absent[0]} for one.")


def _check_safetensors(file: Path) -> None:
    """A truncated download is found here, in microseconds, instead of deep inside loading."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, SAFETENSORS_HEADER_LIMIT):
            raise ModelLoadError(f"{file}: truncated or not a safetensors file ({size} bytes). Download it again.")
        try:
            header = json.loads(handle.read(length))
            end = max(
                (int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelLoadError(f"{file}: its header is damaged ({error}). Download it again.") from error
    if size != 8 + length + end:
        raise ModelLoadError(f"{file}: {size} bytes, but its header describes {8 + length + end}. Download it again.")


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
