"""The rules of the house, read off the source: imports point down, policy knows no torch, files are short, no pickle."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted((SRC / "kvboost").rglob("*.py"))

MAX_LINES = 500

FLOORS = (
    {"errors", "config"},
    {"cache", "attention", "kernels", "models", "weights", "tiers"},
    {"engine", "speculative"},
    {"api"},
    {"cli", "server", "bench"},
)
"""Rooms from the ground up: a room imports from its own floor and those below."""

POLICY = (
    "kvboost.engine.scheduler",
    "kvboost.engine.request",
    "kvboost.engine.sampling_params",
    "kvboost.engine.outputs",
    "kvboost.cache.blocks",
    "kvboost.cache.prefix",
)
"""Decide without touching the device: these run millions of operations in a unit test."""

TORCH_FREE = (*POLICY, "kvboost", "kvboost.errors", "kvboost.config", "kvboost.api.results", "kvboost.cli.main")

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def module_name(file: Path) -> str:
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in a file, those inside functions and TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(file).split(".")
            if file.name != "__init__.py":
                package = package[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def floor(module: str) -> int | None:
    """The floor of a module of ours; None for foreign ones and for the package itself."""
    parts = module.split(".")
    if parts[0] != "kvboost" or len(parts) == 1:
        return None
    return next((i for i, rooms in enumerate(FLOORS) if parts[1] in rooms), None)


def test_every_room_has_a_floor() -> None:
    rooms = {file.relative_to(SRC / "kvboost").parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert rooms <= set().union(*FLOORS)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_down(file: Path) -> None:
    own = floor(module_name(file))
    if own is None:
        return  # kvboost/__init__.py names what it exports, and loads it on first use
    for line, module in imports(file):
        other = floor(module)
        assert other is None or other <= own, f"{file}:{line} imports {module} from a floor above"


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvboost" / "cache" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("import a.b\nfrom ..engine import y\ndef f():\n    from kvboost.api.z import q\n")
    monkeypatch.setitem(globals(), "SRC", tmp_path)
    assert [module for _, module in imports(file)] == ["a.b", "kvboost.engine.y", "kvboost.api.z.q"]
    assert floor("kvboost.api.z.q") == 3 and floor("kvboost.engine.y") == 2 and floor("a.b") is None


@pytest.mark.parametrize("module", TORCH_FREE)
def test_knows_no_torch(module: str) -> None:
    """Neither directly nor through what it imports."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_file_that_claims_to_know_no_torch_does_not_import_it(file: Path) -> None:
    claim = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").lower()
    if "knows no torch" in claim or module_name(file) in POLICY:
        assert not [line for line, module in imports(file) if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_nothing_is_unpickled(file: Path) -> None:
    assert not [(line, module) for line, module in imports(file) if module.split(".")[0] in PICKLES]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in ("load", "save"), f"{file}:{node.lineno} torch.{node.attr} is pickle"
