"""The machine as the operating system describes it: CPUs, memory, load, versions.

Guarantees: torch is not imported; limits of the control group (versions 1 and 2) and the CPU
affinity bound every count; a file that cannot be read lowers no number and raises nothing.

Takes: /proc, /sys and the environment. Gives: MachineFacts and single readings.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Physical cores among the usable CPUs, no more than the CPU quota; at least 1.

    Two hardware threads of a core share its vector units, so the second adds nothing to a GEMM.
    """
    cores = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, math.ceil(min(len(cores), _cpu_quota())))


def _siblings(cpu: int) -> str:
    path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or str(cpu)


def _cpu_quota() -> float:
    """CPUs that the control groups allow; inf without a limit."""
    quota = math.inf
    for group in _cgroups("cpu"):
        v2 = (_read(f"{group}/cpu.max") or "max").split()
        v1 = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")
        if len(v2) == 2 and v2[0].isdigit():
            quota = min(quota, int(v2[0]) / int(v2[1]))
        elif v1[0].isdigit() and v1[1].isdigit():
            quota = min(quota, int(v1[0]) / int(v1[1]))
    return quota


def busy_cores(seconds: float) -> float:
    """Usable cores that other processes keep busy now, time stolen by other guests included.

    Looks at /proc/stat twice, `seconds` apart, and takes off our own use; 0.0 where there is none.
    """
    before, own = _busy_jiffies(), sum(os.times()[:2])
    if before is None:
        return 0.0
    start = time.monotonic()
    time.sleep(seconds)
    after = _busy_jiffies() or before
    elapsed = time.monotonic() - start
    used = (after - before) / os.sysconf("SC_CLK_TCK") - (sum(os.times()[:2]) - own)
    return max(0.0, used / elapsed)


def _busy_jiffies() -> int | None:
    cpus = {f"cpu{i}" for i in usable_cpus()}
    rows = [line.split() for line in _read("/proc/stat").splitlines()]
    # user nice system idle iowait irq softirq steal; guest time is part of user.
    busy = [
        sum(map(int, row[1:9])) - int(row[4]) - int(row[5])
        for row in rows
        if row and row[0] in cpus and len(row) >= 9
    ]
    return sum(busy) if busy else None


def load1() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _cgroups(controller: str) -> Iterator[str]:
    """Directories of this process's control group and its parents, for versions 2 and 1."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            root = "/sys/fs/cgroup"
        elif controller in names.split(","):
            root = f"/sys/fs/cgroup/{controller}"
        else:
            continue
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]])


def _read(path: str) -> str:
    """A small system file, stripped; "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def libc() -> str:
    """E.g. "glibc 2.36"; "" on other C libraries."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """What a number was measured on; part of every benchmark result and run store."""

    cpu: str
    arch: str
    flags: tuple[str, ...]
    """Those of avx2, avx512f, avx512_bf16, amx_bf16, asimd, bf16 that the CPU has."""
    cpus: int
    """Logical CPUs that the process may use."""
    cores: int
    """See `usable_cores`."""
    memory_bytes: int
    """Of the machine or of the control group, whichever is smaller."""
    memory_available_bytes: int
    os: str
    libc: str
    python: str
    versions: dict[str, str]
    """Of packages; "" where not installed."""
    load: tuple[float, float, float]
    """Load averages over 1, 5 and 15 minutes."""


def facts() -> MachineFacts:
    """The machine as it is now; nothing is cached and torch is not imported."""
    import psutil

    rows = (line.partition(":") for line in _read("/proc/cpuinfo").splitlines())
    info = {key.strip(): value.strip() for key, colon, value in rows if colon}
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    flags = info.get("flags", info.get("Features", "")).split()
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, free in _memory_limits():
        total, available = min(total, limit), min(available, free)
    try:
        load = os.getloadavg()
    except OSError:
        load = (0.0, 0.0, 0.0)
    packages = ("treadle", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return MachineFacts(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        arch=platform.machine(),
        flags=tuple(f for f in known if f in flags),
        cpus=len(usable_cpus()),
        cores=usable_cores(),
        memory_bytes=total,
        memory_available_bytes=available,
        os=f"{platform.system()} {platform.release()}",
        libc=libc(),
        python=platform.python_version(),
        versions={p: _version(p) for p in packages},
        load=(round(load[0], 2), round(load[1], 2), round(load[2], 2)),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, still free) in bytes of each control group that has a limit; page cache is free."""
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for group in _cgroups("memory"):
        for limit_file, usage_file, cache_key in files:
            limit, usage = _read(f"{group}/{limit_file}"), _read(f"{group}/{usage_file}")
            if not (limit.isdigit() and usage.isdigit()):
                continue
            rows = (line.split() for line in _read(f"{group}/memory.stat").splitlines())
            cache = sum(int(row[1]) for row in rows if row[0] == cache_key)
            yield int(limit), max(0, int(limit) - (int(usage) - cache))


def cache_dir() -> Path:
    """Where models are kept: $TREADLE_CACHE, $XDG_CACHE_HOME/treadle or ~/.cache/treadle."""
    if own := os.environ.get("TREADLE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "treadle"


def rss_bytes() -> int:
    """Resident memory of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    From VmHWM where it exists: the `ru_maxrss` of a child starts at its parent's size.
    """
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
