"""Threads and malloc, set before torch is imported.

Guarantees: `tune` never fails, sets nothing that the user has set, and records each setting as
applied, the user's, inherited from a parent process of ours, or skipped with a reason.

Takes: the environment and a short look at how busy the machine is. Gives: Tuning.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from treadle.machine import host

SPIN_QUIET, SPIN_MIDDLE, SPIN_BUSY = "3000", "500", "0"
"""Rounds that a libgomp thread spins at a barrier before it sleeps. 3000 makes decoding 1.5x faster
than 0 on a quiet machine and 1.9x slower beside one busy process."""

INHERITED = "TREADLE_TUNED"
"""Names that a parent process of ours set, so that a child does not take them for the user's."""

_MALLOC = (
    # (mallopt name, its number in malloc.h, value, environment variable, glibc tunable)
    ("M_MMAP_MAX", -4, 0, "MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max"),
    ("M_TRIM_THRESHOLD", -1, -1, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
    ("M_TOP_PAD", -2, 64 << 20, "MALLOC_TOP_PAD_", "glibc.malloc.top_pad"),
    # Arenas of other threads cannot hold blocks above 64 MiB without mmap, and unmap themselves:
    # without this the engine's thread would fault in every large buffer again.
    ("M_ARENA_MAX", -8, 1, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What `tune` did. Each name is in exactly one of the four mappings."""

    applied: dict[str, str]
    """Environment variables and mallopt parameters set here."""
    user: dict[str, str]
    """Set by the user before us, and kept."""
    inherited: dict[str, str]
    """Set by a parent process of ours, and kept."""
    skipped: dict[str, str]
    """Not applied, with the reason."""
    threads: int
    """Threads of one parallel operation."""
    busy_cores: float
    """Cores that others kept busy while we looked."""
    reason: str
    """Why this spin count."""


@functools.cache
def tune() -> Tuning:
    """Set thread wake-up, thread count and malloc for this machine; once per process.

    Call before torch is first imported: libgomp reads its settings when it is loaded. Later calls
    return the first record. On anything but Linux nothing is set, and the record says so.
    """
    threads = host.usable_cores()
    if not sys.platform.startswith("linux"):
        why = f"only Linux is tuned, this is {platform.system()}"
        names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "malloc")
        return Tuning(
            applied={},
            user={},
            inherited={},
            skipped=dict.fromkeys(names, why),
            threads=threads,
            busy_cores=0.0,
            reason=why,
        )
    cpus = host.usable_cpus()
    busy = host.busy_cores(0.06)
    if len(cpus) - busy - threads > -0.2 and host.load1() > 0.5 * len(cpus):
        # Quiet now but not of late: a neighbour that comes and goes, or only our own set-up.
        busy = host.busy_cores(0.3)
    spin, reason = choose_spin(busy, len(cpus), threads)

    wanted = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads)}
    if _openmp_runtime() == "libomp":
        wanted["KMP_BLOCKTIME"] = "0" if spin == SPIN_BUSY else "1"
    else:
        wanted["GOMP_SPINCOUNT"] = spin

    applied: dict[str, str] = {}
    user: dict[str, str] = {}
    inherited: dict[str, str] = {}
    skipped: dict[str, str] = {}
    ours = os.environ.get(INHERITED, "").split(",")
    torch_loaded = "torch" in sys.modules
    for name, value in wanted.items():
        if name in os.environ:
            (inherited if name in ours else user)[name] = os.environ[name]
        elif torch_loaded:
            skipped[name] = "torch was imported first and has read its settings"
        else:
            os.environ[name] = applied[name] = value
    if applied:
        os.environ[INHERITED] = ",".join(applied)
    kept = user.get("OMP_NUM_THREADS") or inherited.get("OMP_NUM_THREADS", "")
    if kept.split(",")[0].strip().isdigit():
        threads = int(kept.split(",")[0])
    elif torch_loaded and _lower_threads(threads):
        applied["torch.set_num_threads"] = str(threads)
    _tune_malloc(applied, user, skipped)
    return Tuning(
        applied=applied,
        user=user,
        inherited=inherited,
        skipped=skipped,
        threads=threads,
        busy_cores=round(busy, 2),
        reason=reason,
    )


def choose_spin(busy: float, cpus: int, threads: int) -> tuple[str, str]:
    """The spin count for `threads` on `cpus` of which others keep `busy` cores busy, and why.

    Spinning pays while every thread has a CPU of its own. As soon as one must wait for a
    neighbour, the others spin for nothing and keep that neighbour on the CPU.
    """
    spare = cpus - busy - threads
    seen = f"others kept {busy:.1f} of {cpus} CPUs busy, we want {threads}"
    if spare > -0.2:
        return SPIN_QUIET, f"quiet: {seen}"
    if spare > -0.5:
        return SPIN_MIDDLE, f"in between: {seen}"
    return SPIN_BUSY, f"busy: {seen}"


def _lower_threads(threads: int) -> bool:
    """Bring an imported torch down to `threads`; it does not know of a CPU quota."""
    torch = sys.modules["torch"]
    if getattr(torch, "get_num_threads", lambda: 0)() <= threads:
        return False
    torch.set_num_threads(threads)
    return True


def _tune_malloc(applied: dict[str, str], user: dict[str, str], skipped: dict[str, str]) -> None:
    """Make malloc keep large buffers instead of giving them back and faulting them in again."""
    why = ""
    if not host.libc().startswith("glibc"):
        why = "the C library is not glibc"
    elif any(a in os.environ.get("LD_PRELOAD", "") for a in ("jemalloc", "tcmalloc", "mimalloc")):
        why = "LD_PRELOAD replaces malloc"
    if why:
        skipped["malloc"] = why
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError) as error:
        skipped["malloc"] = f"no mallopt: {error}"
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name, number, value, variable, tunable in _MALLOC:
        if variable in os.environ:
            user[variable] = os.environ[variable]
        elif tunable in tunables:
            user[tunable] = tunables
        elif mallopt(number, value):
            applied[name] = str(value)
        else:
            skipped[name] = f"mallopt refused {value}"


def _openmp_runtime() -> str:
    """Which one torch ships, "libomp" or "libgomp", seen without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        names = [p.name for p in (Path(spec.origin).parent / "lib").glob("lib*omp*")]
        if any(n.startswith(("libomp", "libiomp")) for n in names):
            return "libomp"
    return "libgomp"
