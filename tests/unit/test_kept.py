"""`kvboost cache`: what is kept between starts, shown and removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvboost.cache.kept import kept, remove
from kvboost.cache.pages import zeroed_buffer
from kvboost.cli.main import app
from kvboost.errors import ConfigError
from kvboost.kernels.native import build
from kvboost.kernels.native.build import NativeUnavailable
from kvboost.weights.disk import DiskStore, cache_directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    return tmp_path / "kvboost"


def streamed(key: str, name: str, nbytes: int, age_days: float = 0) -> Path:
    """A layer of a streamed model, as streaming leaves it."""
    store = DiskStore(cache_directory(), key, [nbytes], name)
    store.write(0, zeroed_buffer(nbytes))
    store.close()
    then = time.time() - age_days * 86_400
    for path in (*store.directory.iterdir(), store.directory):
        os.utime(path, (then, then))
    return store.directory


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_nothing_is_kept_and_nothing_removed() -> None:
    assert kept() == [] and run() == "Nothing is kept.\n" and run("--clear") == "Nothing was removed.\n"


def test_what_is_kept_is_told_largest_first(own_cache: Path) -> None:
    streamed("a", "Qwen/Qwen3-32B", 3 << 20)
    streamed("b", "/models/small.gguf", 1 << 20)
    (own_cache / "native").mkdir()
    (own_cache / "native" / "kernels-1.so").write_bytes(bytes(2 << 20))
    items = kept()
    assert [(i.kind, i.name) for i in items] == [
        ("streamed layers", "Qwen/Qwen3-32B"), ("CPU kernels", "1 files"), ("streamed layers", "/models/small.gguf"),
    ]  # fmt: skip
    assert items[0].nbytes >= 3 << 20 and abs(items[0].used - time.time()) < 60
    rows = json.loads(run("--json"))["kept"]
    assert [row["name"] for row in rows] == [i.name for i in items]
    assert rows[0]["gib"] == pytest.approx(3 / 1024, rel=0.01)
    shown = run()
    assert "streamed layers" in shown and "Qwen3-32B" in shown.replace("\n", "") and "GiB kept" in shown


def test_clearing_removes_all_or_what_is_old(own_cache: Path) -> None:
    old, new = streamed("a", "old", 4096, age_days=40), streamed("b", "new", 4096, age_days=1)
    removed = json.loads(run("--clear", "--older-than-days", "30", "--json"))["removed"]
    assert [row["name"] for row in removed] == ["old"] and not old.exists() and new.exists()
    assert "removed" in run("--clear") and not new.exists() and kept() == []


def test_use_is_seen_by_the_directory() -> None:
    directory = streamed("a", "model", 4096, age_days=40)
    DiskStore(cache_directory(), "a", [4096], "model").close()  # a start that finds its layers
    assert directory.exists() and time.time() - kept()[0].used < 60


def test_age_without_clear_is_refused() -> None:
    with pytest.raises(ConfigError, match="Add --clear"):
        run("--older-than-days", "3")


def test_a_home_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match=r"KVBOOST_CACHE_DIR.*no home directory"):
        run()
    with pytest.raises(NativeUnavailable, match="no home directory"):  # and so everything runs in PyTorch
        build.library()


def test_hostile_names_and_links_do_no_harm(own_cache: Path, tmp_path: Path) -> None:
    directory = streamed("a", "model", 4096)
    (directory / "model").write_bytes(b"\x1b[31mred\x07 \xff" + b"x" * 100_000)
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("stay")
    (own_cache / "layers" / "link").symlink_to(target)
    (directory / "link").symlink_to(target / "precious")
    [item] = kept()
    assert "\x1b" not in item.name and "red" in item.name and len(item.name) <= 200
    assert item.nbytes < 1 << 20, "a link does not count for what it names"
    remove(item)
    assert (target / "precious").read_text() == "stay" and not directory.exists()


def test_a_store_whose_name_cannot_be_written_still_works() -> None:
    directory = streamed("a", "model", 4096)
    (directory / "model").unlink()
    (directory / "model").mkdir()
    assert streamed("a", "model", 4096) == directory and kept()[0].name == "unknown"
