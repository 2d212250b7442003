"""Machine facts and tuning: limits are respected, the user's settings win, nothing raises."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest

from treadle import machine
from treadle.machine import host
from treadle.machine.tuning import SPIN_BUSY, SPIN_MIDDLE, SPIN_QUIET, choose_spin

SETTINGS = ("OMP_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "TREADLE_TUNED")


def tuned(code: str = "", **environment: str) -> dict:
    """The record of `tune` in a fresh process with only these thread and malloc settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    script = (
        f"{code}\nimport dataclasses, json\nfrom treadle import machine\n"
        "print(json.dumps(dataclasses.asdict(machine.tune())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is tuned")
glibc = pytest.mark.skipif(not host.libc(), reason="the C library is not glibc")


@linux
def test_a_bare_environment_gets_passive_waiting_and_a_thread_per_core():
    record = tuned()
    assert record["applied"]["OMP_WAIT_POLICY"] == "passive"
    assert (
        record["applied"]["OMP_NUM_THREADS"] == str(record["threads"]) == str(host.usable_cores())
    )
    assert record["user"] == record["inherited"] == {}
    assert record["reason"]


@linux
@glibc
def test_malloc_keeps_large_buffers_instead_of_returning_them():
    """The second allocation of 160 MB on another thread faults nothing in."""
    fault = (
        "import ctypes, resource, threading\nlibc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "libc.malloc.argtypes = [ctypes.c_size_t]\nlibc.free.argtypes = [ctypes.c_void_p]\n"
        "def touch():\n"
        "    p = libc.malloc(160 << 20); ctypes.memset(p, 1, 160 << 20); libc.free(p)\n"
        "def work():\n"
        "    touch(); a = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    touch(); global faults\n"
        "    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - a\n"
        "from treadle import machine\nmachine.tune()\n"
        "t = threading.Thread(target=work); t.start(); t.join()\n"
        "assert faults < 100, faults\n"
    )
    record = tuned(fault)
    assert {"M_MMAP_MAX", "M_TRIM_THRESHOLD", "M_TOP_PAD", "M_ARENA_MAX"} <= set(record["applied"])


@linux
@glibc
def test_what_the_user_set_wins_and_is_recorded():
    record = tuned(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="active",
        GOMP_SPINCOUNT="777",
        MALLOC_ARENA_MAX="4",
        GLIBC_TUNABLES="glibc.malloc.trim_threshold=1000000",
    )
    assert record["threads"] == 1
    assert record["user"]["OMP_NUM_THREADS"] == "1"
    assert record["user"]["OMP_WAIT_POLICY"] == "active"
    assert record["user"]["GOMP_SPINCOUNT"] == "777"
    assert record["user"]["MALLOC_ARENA_MAX"] == "4"
    assert "glibc.malloc.trim_threshold" in record["user"]
    assert set(record["applied"]) <= {"M_MMAP_MAX", "M_TOP_PAD", "KMP_BLOCKTIME"}


@linux
def test_a_child_keeps_its_parents_choice_and_does_not_call_it_the_users():
    record = tuned(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="500",
        TREADLE_TUNED="OMP_WAIT_POLICY,GOMP_SPINCOUNT",
    )
    assert record["inherited"] == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "500"}
    assert record["user"]["OMP_NUM_THREADS"] == "1"


@linux
def test_a_late_call_says_that_torch_came_first():
    record = tuned("import torch")
    assert "torch was imported first" in record["skipped"]["OMP_WAIT_POLICY"]
    assert "OMP_WAIT_POLICY" not in record["applied"]


@linux
def test_a_replaced_malloc_is_left_alone(tmp_path):
    # A library of that name that cannot be loaded: the loader warns and goes on.
    record = tuned(LD_PRELOAD=str(tmp_path / "libjemalloc.so"))
    assert record["skipped"] == {"malloc": "LD_PRELOAD replaces malloc"}


def test_tune_returns_one_record_per_process():
    assert machine.tune() is machine.tune()


def test_another_system_is_a_no_op_with_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    before = dict(os.environ)
    record = machine.tune.__wrapped__()
    assert record.applied == {} and dict(os.environ) == before
    assert all("only Linux" in reason for reason in record.skipped.values())
    assert record.threads >= 1


@pytest.mark.parametrize(
    ("busy", "cpus", "threads", "spin"),
    [
        (0.0, 2, 2, SPIN_QUIET),
        (0.3, 2, 2, SPIN_MIDDLE),
        (1.0, 2, 2, SPIN_BUSY),
        (2.0, 2, 2, SPIN_BUSY),
        (6.0, 16, 8, SPIN_QUIET),  # 8 hardware threads are ours alone
        (8.3, 16, 8, SPIN_MIDDLE),
        (0.9, 64, 64, SPIN_BUSY),  # one late thread makes 63 wait
        (60.0, 64, 2, SPIN_QUIET),  # a quota of 2 on a large host with room
    ],
)
def test_spinning_pays_while_every_thread_has_a_cpu_of_its_own(busy, cpus, threads, spin):
    got, reason = choose_spin(busy, cpus, threads)
    assert got == spin
    assert f"{cpus} CPUs" in reason


@linux
def test_a_busy_neighbour_is_seen():
    code = "import time\nt = time.monotonic()\nwhile time.monotonic() - t < 20: pass"
    quiet = min(host.busy_cores(0.1) for _ in range(3))
    neighbours = [subprocess.Popen([sys.executable, "-c", code]) for _ in host.usable_cpus()]
    try:
        loud = max(host.busy_cores(0.2) for _ in range(5))
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert loud > 0.5 or quiet > 0.5
    assert loud <= len(host.usable_cpus()) * 1.5


# --------------------------------------------------------------------------- limits, by hand


def fake_files(monkeypatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(host, "_read", lambda path: files.get(path, ""))


def test_cpu_quota_of_a_version_2_group_is_the_least_of_its_parents(monkeypatch):
    fake_files(
        monkeypatch,
        {
            "/proc/self/cgroup": "0::/a/b",
            "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "/sys/fs/cgroup/a/cpu.max": "150000 100000",
        },
    )
    assert host._cpu_quota() == 1.5
    monkeypatch.setattr(host, "usable_cpus", lambda: {0, 1, 2, 3})
    assert host.usable_cores() == 2


def test_cpu_quota_of_a_version_1_group(monkeypatch):
    fake_files(
        monkeypatch,
        {
            "/proc/self/cgroup": "4:memory:/m\n1:cpu,cpuacct:/c",
            "/sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert host._cpu_quota() == 3.0


def test_no_group_means_no_quota(monkeypatch):
    fake_files(monkeypatch, {})
    assert host._cpu_quota() == math.inf


def test_two_hardware_threads_of_a_core_count_once(monkeypatch):
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    fake_files(monkeypatch, {topology.format(i): f"{i % 2},{i % 2 + 2}" for i in range(4)})
    monkeypatch.setattr(host, "usable_cpus", lambda: {0, 1, 2, 3})
    assert host.usable_cores() == 2


def test_memory_is_that_of_the_group_and_its_page_cache_is_free(monkeypatch):
    group = "/sys/fs/cgroup/box"
    fake_files(
        monkeypatch,
        {
            "/proc/self/cgroup": "0::/box",
            f"{group}/memory.max": "1000",
            f"{group}/memory.current": "700",
            f"{group}/memory.stat": "anon 400\ninactive_file 250\nactive_file 50",
        },
    )
    assert list(host._memory_limits()) == [(1000, 550)]
    facts = machine.facts()
    assert (facts.memory_bytes, facts.memory_available_bytes) == (1000, 550)


# --------------------------------------------------------------------------- facts and probe


def test_facts_survive_json_and_name_the_versions():
    facts = machine.facts()
    again = json.loads(json.dumps(dataclasses.asdict(facts)))
    assert again["cores"] >= 1 and again["cpus"] >= again["cores"]
    assert 0 < again["memory_available_bytes"] <= again["memory_bytes"]
    assert again["versions"]["torch"] and again["versions"]["transformers"]
    assert again["cpu"] and again["python"]


def test_machine_and_facts_import_no_torch():
    code = (
        "import sys\nfrom treadle import machine\nmachine.facts()\nmachine.tune()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_probe_measures_once_and_explains_its_dtype():
    probe = machine.probe()
    assert probe is machine.probe()
    assert probe.fp32_gflops > 0
    if probe.device == "cpu":
        # From the printed rates, which are rounded.
        assert (probe.dtype == "bfloat16") == (probe.bf16_gflops > 1.2 * probe.fp32_gflops)
    assert probe.reason
    json.dumps(dataclasses.asdict(probe))


def test_peak_memory_is_at_least_what_is_resident():
    assert machine.peak_rss_bytes() >= machine.rss_bytes() * 0.9 > 1 << 20


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "own"))
    assert machine.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("TREADLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_dir() == tmp_path / "treadle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert machine.cache_dir() == tmp_path / "home/.cache/treadle"
