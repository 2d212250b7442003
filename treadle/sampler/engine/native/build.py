"""The shared library of the native decoder: compiled once per machine, at first use.

Guarantees: the library that is loaded was built from exactly the sources beside this file, by the
compiler that is installed now (their hash is its name); a half-written library is never seen
(atomic rename); whatever goes wrong is a reason in words, never an exception.

Takes: *.cpp and *.h, the system's C++ compiler. Gives: a ctypes library, or why there is none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from treadle.machine import cache_dir

SOURCES = Path(__file__).parent

# Which kernel runs is decided on the machine, so the flags do not follow its CPU: a cache on a
# shared home directory serves all of its nodes. GCC 12 warns inside its own intrinsics.
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-w"),
    *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    *("-mamx-tile", "-mamx-bf16"),
)
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
"""What the code needs in any case, as /proc/cpuinfo names it."""
COMPILE_LIMIT_S = 300.0


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none. Compiles when the cache lacks it (seconds)."""
    if reason := _unsuitable():
        return reason
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler (looked for $CXX, g++, c++, clang++)"
    try:
        path = _built(compiler)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        first = next((x for x in str(error.stderr).splitlines() if "error" in x), "no message")
        return f"{compiler} failed: {first.strip()[:300]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def _unsuitable() -> str | None:
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return f"only Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        return f"/proc/cpuinfo: {error}"
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    lacking = [name for name in CPU_FLAGS if name not in flags]
    return f"cpu lacks {' '.join(lacking)}" if lacking else None


def _compiler() -> str | None:
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _built(compiler: str) -> Path:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=30
    ).stdout
    digest = hashlib.sha256("\0".join((version, *FLAGS)).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    directory = cache_dir() / "native"
    path = directory / f"decoder-{digest.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    # Two processes may both compile; each renames a whole library over the other's equal one.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / path.name
        subprocess.run(
            [compiler, *FLAGS, str(SOURCES / "decoder.cpp"), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_LIMIT_S,
        )
        made.replace(path)
    return path
