"""Files of a quantisation: one per finished part in OUT.partial, which an interrupted run finds again, then OUT at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kvboost.errors import ConfigError, ModelLoadError
from kvboost.weights.safetensors_reader import INDEX, SINGLE, TensorFiles, read_header

SHARD_BYTES = 4 << 30
"""Of one weight file; parts are joined up to it."""

PLAN = "plan.json"


class Output:
    """OUT and OUT.partial. OUT appears whole or not at all; a part in OUT.partial is whole or absent."""

    def __init__(self, path: str | Path, overwrite: bool) -> None:
        """Raises `ConfigError` when OUT is there already, unless it may be overwritten."""
        self.path = Path(path).expanduser()
        self.partial = self.path.with_name(self.path.name + ".partial")
        if self.path.exists() and not overwrite:
            raise ConfigError("out", f"{self.path} exists. Give another directory, or --overwrite.")
        if self.path.exists() and not (self.path / "config.json").is_file() and any(self._entries()):
            raise ConfigError(
                "out", f"{self.path} is no model directory: it is not overwritten. Give another directory."
            )

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else [self.path]

    def begin(self, plan: dict[str, Any]) -> int:
        """Parts that an earlier run with the same plan has left; what another plan left is deleted."""
        file = self.partial / PLAN
        try:
            known = json.loads(file.read_text()) if file.is_file() else None
        except ValueError:
            known = None
        if known != plan:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            _write(file, json.dumps(plan))
        count = 0
        while self._is_whole(count):
            count += 1
        return count

    def _is_whole(self, part: int) -> bool:
        try:
            return self.part(part).is_file() and bool(read_header(self.part(part)))
        except ModelLoadError:
            return False

    def part(self, index: int) -> Path:
        return self.partial / f"part-{index:05d}.safetensors"

    def write_part(self, index: int, tensors: dict[str, Tensor]) -> None:
        temporary = self.part(index).with_suffix(".tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.part(index))

    def finish(self, parts: int, texts: dict[str, Any], save: Callable[[str], Any] | None) -> None:
        """Join the parts into weight files, add JSON `texts` by file name and what `save` writes into a directory, and put
        OUT in its place."""
        made = self.partial / "made"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        for name, content in texts.items():
            _write(made / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        self._join(parts, made)
        if save is not None:
            save(str(made))
        if self.path.exists():
            old = self.path.with_name(self.path.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
            made.rename(self.path)
            shutil.rmtree(old)
        else:
            made.rename(self.path)
        shutil.rmtree(self.partial)

    def _join(self, parts: int, made: Path) -> None:
        shards: list[list[int]] = [[]]
        size = 0
        for part in range(parts):
            nbytes = self.part(part).stat().st_size
            if shards[-1] and size + nbytes > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += nbytes
        listed: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for part in shard:
                files = TensorFiles(self.partial, {t.name: t for t in read_header(self.part(part))})
                tensors.update({tensor: files.read(tensor) for tensor in files})
            save_file(tensors, made / name, {"format": "pt"})
            shutil.copymode(made / "config.json", made / name)  # safetensors writes for the owner alone
            listed.update(dict.fromkeys(tensors, name))
            total += sum(tensor.nbytes for tensor in tensors.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
            _write(made / INDEX, json.dumps(index, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
