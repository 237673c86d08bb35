"""Compiles the C++ kernels for the processor at hand and keeps the library between starts.

The library is native code that we load: it is kept in a directory that only this user may write, under a name made of
the sources, the compiler and the processor's features, so that a change of any gives a new one.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

from kvboost.cache.private import cache_path, is_private
from kvboost.errors import ConfigError

log = logging.getLogger("kvboost")

SOURCE = "kernels.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-fPIC")
COMPILE_TIMEOUT_S = 120


class NativeUnavailable(Exception):
    """The kernels cannot be had on this machine; the text says why."""


def library() -> Path:
    """Path of the compiled library, made now if it is not there yet (about 12 s). Raises `NativeUnavailable`."""
    if platform.system() != "Linux":
        raise NativeUnavailable(f"the C++ kernels are built on Linux only, not on {platform.system()}")
    compiler, version = _compiler()
    directory = _directory()
    path = directory / f"kernels-{_key(version)}.so"
    if not path.is_file():
        _compile(compiler, path)
    _require_own(path)
    return path


def _compiler() -> tuple[str, str]:
    """A GNU compiler: its OpenMP is the one PyTorch has loaded already; a second one would fight it for the cores."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        found = shutil.which(name)
        if found is None:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        if "Free Software Foundation" in version:
            return found, version.splitlines()[0]
    raise NativeUnavailable("no GNU C++ compiler was found (install g++)")


def _directory() -> Path:
    try:
        directory = cache_path("native")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ConfigError) as error:
        raise NativeUnavailable(f"the kernels' directory cannot be made ({error}); set KVBOOST_CACHE_DIR") from error
    _require_own(directory)
    return directory


def _require_own(path: Path) -> None:
    """Code that others could have written is not loaded."""
    if not is_private(path):
        raise NativeUnavailable(
            f"{path} belongs to or can be written by others; set KVBOOST_CACHE_DIR to a private one"
        )


def _key(compiler_version: str) -> str:
    here = Path(__file__).parent
    digest = blake2b(digest_size=12)
    for file in sorted((*here.glob("*.cpp"), *here.glob("*.h"))):
        digest.update(file.name.encode() + file.read_bytes())
    for text in (compiler_version, *FLAGS, _processor()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith(("flags", "Features", "model name", "CPU part"))]
    except OSError:
        return platform.processor()
    return "".join(dict.fromkeys(lines))


def _compile(compiler: str, target: Path) -> None:
    here = Path(__file__).parent
    log.info("compiling the CPU kernels with %s (once; kept in %s)", compiler, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *FLAGS, "-fopenmp", "-shared", "-o", str(built), str(here / SOURCE)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, cwd=scratch
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NativeUnavailable(f"the compiler could not be run: {error}") from error
        if done.returncode:
            log.debug("%s\n%s", " ".join(command), done.stderr)
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise NativeUnavailable(f"the compiler refused the kernels: {first}")
        built.chmod(0o700)
        os.replace(built, target)  # another process may have done the same; either file is good
