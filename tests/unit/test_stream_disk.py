"""Layer files: what was written is read, and what is torn, foreign or altered is never used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvboost.cache.pages import zeroed_buffer
from kvboost.errors import ConfigError, ModelLoadError
from kvboost.weights import disk
from kvboost.weights.disk import HEADER_BYTES, DiskStore, cache_directory, measure_disk

SIZES = [3 * 4096, 4096, 5 * 4096]


def layer(index: int) -> Tensor:
    buffer = zeroed_buffer(SIZES[index])
    buffer.copy_(torch.randint(0, 256, (SIZES[index],), generator=torch.Generator().manual_seed(index)))
    return buffer


def written(directory: Path, key: str = "weights") -> DiskStore:
    store = DiskStore(directory, key, SIZES)
    for index in range(3):
        store.write(index, layer(index))
    return store


def read(store: DiskStore, index: int) -> Tensor:
    out = zeroed_buffer(SIZES[index])
    store.read_into(index, out)
    return out


def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", 8192)  # two threads for a layer of three pages
    for _ in range(2):  # the second time from files that are there
        store = DiskStore(tmp_path, "weights", SIZES)
        assert store.missing(range(3)) == ([] if _ else [0, 1, 2])
        for index in range(3):
            store.write(index, layer(index))
            assert torch.equal(read(store, index), layer(index))
        store.close()


def test_files_are_private_and_read_past_the_page_cache(tmp_path: Path) -> None:
    store = written(tmp_path)
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in store.directory.iterdir()} == {0o600}
    assert len(list(store.directory.iterdir())) == 4, "three layers and a name; nothing temporary is left"
    try:
        os.close(os.open(store.path(0), os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert all(file.direct for file in store._files.values())
    store.close()


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def _flip(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def _replace(name: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes((file.parent / name).read_bytes())

    return change


def _link(file: Path) -> None:
    other = file.with_name("elsewhere")
    file.rename(other)
    file.symlink_to(other)


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in its header": lambda file: os.truncate(file, 100),
    "cut in its data": _truncate,
    "a hole where data were": lambda file: file.write_bytes(file.read_bytes()[:HEADER_BYTES] + bytes(SIZES[0])),
    "one bit of its magic": _flip(0),
    "one bit of its fields": _flip(20),
    "one bit of its checksum": _flip(HEADER_BYTES - 1),
    "its first data bit": _flip(HEADER_BYTES),
    "its last data bit": _flip(HEADER_BYTES + SIZES[0] - 1),
    "another layer": _replace("layer-0002.kvl"),
    "a link": _link,
    "a directory": _directory,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_missing_and_is_written_again(damage: str, tmp_path: Path) -> None:
    written(tmp_path).close()
    store = DiskStore(tmp_path, "weights", SIZES)
    path = store.path(0)
    DAMAGE[damage](path)
    assert store.missing(range(3)) == [0]
    if damage == "a directory":
        with pytest.raises(ModelLoadError, match=r"layer-0000.kvl: the layer could not be written"):
            store.write(0, layer(0))
        return
    store.write(0, layer(0))
    assert torch.equal(read(store, 0), layer(0))
    assert not path.is_symlink()
    store.close()
    assert DiskStore(tmp_path, "weights", SIZES).missing(range(3)) == []


def test_files_of_other_weights_are_never_taken(tmp_path: Path) -> None:
    written(tmp_path).close()
    other = DiskStore(tmp_path, "other weights", SIZES)
    assert other.missing(range(3)) == [0, 1, 2]
    for index in range(3):  # even when someone puts them in the right place
        other.path(index).write_bytes(DiskStore(tmp_path, "weights", SIZES).path(index).read_bytes())
    assert other.missing(range(3)) == [0, 1, 2]


def test_equal_bytes_are_not_written_again_and_others_are(tmp_path: Path) -> None:
    store = written(tmp_path)
    before = store.path(0).stat().st_ino
    store.write(0, layer(0))
    assert store.path(0).stat().st_ino == before
    changed = layer(0)
    changed[5] ^= 1
    store.write(0, changed)
    assert store.path(0).stat().st_ino != before
    assert torch.equal(read(store, 0), changed)
    store.close()


def test_a_file_that_shrinks_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    store = written(tmp_path)
    os.truncate(store.path(0), HEADER_BYTES + 4096)
    with pytest.raises(ModelLoadError, match=r"layer-0000.kvl: could not be read .* Load the model again"):
        read(store, 0)
    store.close()


def test_without_o_direct_it_reads_as_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return own(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    store = written(tmp_path)
    assert not any(file.direct for file in store._files.values())
    assert torch.equal(read(store, 2), layer(2))
    store.close()


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    store = written(tmp_path)
    dead = store.directory / "layer-0000.kvl.tmp-4194304"  # above the largest process id there is
    mine = store.directory / f"layer-0000.kvl.tmp-{os.getpid()}"
    for file in (dead, mine):
        file.write_bytes(b"half")
    store.close()
    DiskStore(tmp_path, "weights", SIZES).close()
    assert not dead.exists() and mine.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = DiskStore(tmp_path, "weights", SIZES)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ModelLoadError, match="No space left on device"):
        store.write(0, layer(0))
    assert [file.name for file in store.directory.iterdir()] == ["model"]


def test_a_drive_without_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match="KVBOOST_CACHE_DIR: the streamed layers take"):
        DiskStore(tmp_path, "weights", SIZES).require_room([0, 1])


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    path = cache_directory()
    assert path == tmp_path / "kvboost" / "layers" and path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"KVBOOST_CACHE_DIR: .* can be written by others. Run `chmod 700"):
        cache_directory()
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Give a directory that can be written"):
        cache_directory()


def test_measuring_a_drive_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PROBE_BYTES", 1 << 20)
    assert 1e6 < measure_disk(tmp_path) < 1e12
    assert list(tmp_path.iterdir()) == []
