"""Compiles CUDA C++ with NVRTC, the compiler library that PyTorch's CUDA wheels bring, and keeps the result between starts.

Results are machine code that we load: they are kept in a directory that only this user may write, under a name made of the
sources, the compiler's version, the GPU's kind and the definitions.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvboost.cache.private import cache_path, is_private, make_private
from kvboost.errors import ConfigError

HERE = Path(__file__).parent
MAJORS = ("13", "12")
"""Versions of CUDA whose NVRTC is looked for; that of PyTorch's own comes first, as the driver serves it."""

DIGEST_BYTES = 32


class CudaUnavailable(RuntimeError):
    """CUDA C++ kernels cannot be had on this machine; the text says why."""


def cubin(source: str, definitions: Mapping[str, int], capability: tuple[int, int], *, only: bool = False) -> bytes:
    """Machine code of `source`, a file beside this one, for GPUs of a compute capability. Raises `CudaUnavailable`.

    only: with the instructions that no other capability has, newer ones included (`sm_90a`).
    """
    compiler = nvrtc()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}{'a' if only else ''}", "--std=c++17"]
    options += [f"-D{name}={int(value)}" for name, value in sorted(definitions.items())]
    path = _kept(source, options, compiler)
    code = None if path is None else _found(path)
    if code is None:
        code = compiler.compile(source, options)
        if path is not None:
            _keep(path, code)
    return code


@lru_cache
def nvrtc() -> Nvrtc:
    """The compiler. Raises `CudaUnavailable`."""
    tried = []
    for major in sorted(MAJORS, key=lambda major: not (torch.version.cuda or "").startswith(major)):
        name = f"libnvrtc.so.{major}"
        for path in (*_beside_torch(name), name):
            try:
                return Nvrtc(path)
            except OSError as error:
                tried.append(str(error))
    raise CudaUnavailable(f"NVRTC, which PyTorch's CUDA packages bring, was not found ({tried[-1]})")


def _beside_torch(name: str) -> list[str]:
    """Where the packages put it that PyTorch's wheels depend on."""
    spec = find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [str(path) for root in roots for path in sorted(Path(root).glob(f"*/lib/{name}"))]


class Nvrtc:
    """The C interface of one NVRTC library. Raises OSError when it cannot be opened."""

    def __init__(self, path: str) -> None:
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if os.path.isabs(path) else ():
            ctypes.CDLL(str(builtins))  # NVRTC asks for it by name only
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, options: list[str]) -> bytes:
        headers = sorted(HERE.glob("*.h"))
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
        names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
        status = self._library.nvrtcCreateProgram(
            ctypes.byref(program), (HERE / source).read_bytes(), source.encode(), len(headers), texts, names
        )
        if status:
            raise CudaUnavailable(f"NVRTC gave error {status} for {source}")
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), given):
                log = self._text(program, "ProgramLog").decode(errors="replace")
                raise CudaUnavailable(f"NVRTC {self.version} refused {source} with {' '.join(options)}: {log[:2000]}")
            return self._text(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: Any, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def _kept(source: str, options: list[str], compiler: Nvrtc) -> Path | None:
    """Where a result is or will be; None where there is no directory of our own."""
    digest = blake2b(digest_size=12)
    for file in (HERE / source, *sorted(HERE.glob("*.h"))):
        digest.update(file.name.encode() + file.read_bytes())
    for text in (compiler.version, *options):
        digest.update(text.encode() + b"\0")
    try:
        directory = cache_path("cuda")
        return directory / f"{Path(source).stem}-{digest.hexdigest()}.cubin" if make_private(directory) else None
    except (OSError, ConfigError):
        return None


def _found(path: Path) -> bytes | None:
    """The code in a kept file; None where there is none, or it is torn. Raises `CudaUnavailable` for one of others."""
    try:
        private, content = is_private(path), path.read_bytes()
    except OSError:
        return None
    if not private:
        raise CudaUnavailable(f"{path} can be written by others; set KVBOOST_CACHE_DIR to a private directory")
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if code and blake2b(code, digest_size=DIGEST_BYTES).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Another process may do the same; either file is good. A full drive only means compiling again."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            made.write_bytes(blake2b(code, digest_size=DIGEST_BYTES).digest() + code)
            made.chmod(0o600)
            os.replace(made, path)
    except OSError:
        pass
