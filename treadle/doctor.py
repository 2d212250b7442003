"""What this machine can do for Treadle, as a list of checks.

Guarantees: nothing is changed, except that torch is imported and small products are timed; the
network is asked only when wanted; a check that fails says why and what to do.

Takes: the machine, the environment and the model cache. Gives: one JSON document.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treadle import machine
from treadle.models import catalog, hub

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "warn"]
    reason: str
    hint: str = ""
    """What to do; "" when ok."""


def doctor(*, network: bool = False) -> dict[str, Any]:
    """Look at everything: {"ok", "checks", "facts", "tuning", "probe", "models"}, JSON values.

    "ok" is about the machine's set-up: that it is busy at the moment is a remark.

    Args:
        network: also ask the Hugging Face hub for an answer (one request, a few seconds at most).
    """
    tuning = machine.tune()
    facts, probe = machine.facts(), machine.probe()
    models = catalog.listing()
    checks = [
        *_processor(facts, probe),
        _threads(tuning),
        _load(facts),
        _memory(facts),
        _compiler(),
        *_packages(facts),
        _cache(),
        _models(models),
    ]
    if network:
        checks.append(_hub())
    return {
        "ok": all(c.status == "ok" for c in checks if c.name != "load"),
        "checks": [dataclasses.asdict(c) for c in checks],
        "facts": dataclasses.asdict(facts),
        "tuning": dataclasses.asdict(tuning),
        "probe": dataclasses.asdict(probe),
        "models": [dataclasses.asdict(m) for m in models],
    }


def _processor(facts: machine.MachineFacts, probe: machine.Probe) -> Iterator[Check]:
    rates = f"{probe.fp32_gflops:.0f} GFLOPS float32, {probe.bf16_gflops:.0f} bfloat16"
    yield Check(
        name="dtype", status="ok", reason=f"{probe.device}: {probe.dtype}, {rates}; {probe.reason}"
    )
    if probe.device == "cpu" and facts.cores < 2:
        yield Check(
            name="cores",
            status="warn",
            reason="one usable core: sampling and training take turns on it",
            hint="allow the process a second core (affinity, container limit)",
        )


def _threads(tuning: machine.Tuning) -> Check:
    kept = {**tuning.user, **tuning.inherited}
    settings = ", ".join(f"{k}={v}" for k, v in {**kept, **tuning.applied}.items())
    if tuning.skipped:
        why = "; ".join(f"{name}: {reason}" for name, reason in tuning.skipped.items())
        return Check(
            name="threads",
            status="warn",
            reason=f"not everything could be set: {why}",
            hint="import treadle before torch, or start with the `treadle` command",
        )
    return Check(
        name="threads",
        status="ok",
        reason=f"{tuning.threads} threads, {tuning.reason}; {settings or 'nothing set'}",
    )


def _load(facts: machine.MachineFacts) -> Check:
    busy = f"load average {facts.load[0]:.1f} on {facts.cores} usable cores"
    if facts.load[0] <= facts.cores:
        return Check(name="load", status="ok", reason=busy)
    return Check(
        name="load",
        status="warn",
        reason=f"{busy}: other work wants them too, so everything takes longer, and times and "
        "rates measured now say little",
        hint="wait for that work to end where time matters; results are the same",
    )


def _memory(facts: machine.MachineFacts) -> Check:
    free, total = facts.memory_available_bytes / GIB, facts.memory_bytes / GIB
    reason = f"{free:.1f} of {total:.1f} GiB available"
    if free >= 4:
        return Check(name="memory", status="ok", reason=reason)
    return Check(
        name="memory",
        status="warn",
        reason=f"{reason}; the first run takes about 4",
        hint="close other programs, or lower learn.micro_tokens",
    )


def _compiler() -> Check:
    names = [os.environ.get("CXX") or "", "c++", "g++", "clang++"]
    for name in filter(None, names):
        if path := shutil.which(name):
            return Check(name="compiler", status="ok", reason=path)
    return Check(
        name="compiler",
        status="warn",
        reason="no C++ compiler: parts that are compiled at first use fall back to slower ones",
        hint="install g++ or clang++, or name one in CXX",
    )


def _packages(facts: machine.MachineFacts) -> Iterator[Check]:
    for package, least in (("torch", (2, 11)), ("transformers", (5, 0))):
        version = facts.versions[package]
        digits = [p for p in version.split("+")[0].split(".")[:2] if p.isdigit()]
        wanted = ".".join(map(str, least))
        if tuple(map(int, digits)) >= least:
            yield Check(name=package, status="ok", reason=version)
        else:
            yield Check(
                name=package,
                status="warn",
                reason=f"{version or 'not installed'}, at least {wanted} is needed",
                hint=f"pip install '{package}>={wanted}'",
            )


def _cache() -> Check:
    path = machine.cache_dir()
    place = _nearest(path)
    free = shutil.disk_usage(place).free / GIB
    reason = f"{path}: {free:.1f} GiB free"
    hint = "set TREADLE_CACHE to a directory on another disk"
    if not os.access(place, os.W_OK):
        return Check(name="cache", status="warn", reason=f"{path} is not writable", hint=hint)
    if free < 2:
        return Check(
            name="cache", status="warn", reason=f"{reason}; a model takes up to 2", hint=hint
        )
    return Check(name="cache", status="ok", reason=reason)


def _nearest(path: Path) -> Path:
    """The path itself or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def _models(models: list[catalog.Row]) -> Check:
    here = [m.name for m in models if m.present and not m.name.startswith("tiny-")]
    if here:
        return Check(name="models", status="ok", reason=", ".join(here))
    return Check(
        name="models",
        status="warn",
        reason="no pretrained model on this machine yet",
        hint="treadle models pull smollm2-135m",
    )


def _hub() -> Check:
    if reason := hub.why_unreachable():
        return Check(
            name="hub",
            status="warn",
            reason=f"the Hugging Face hub cannot be reached: {reason}",
            hint="set HF_ENDPOINT to a mirror; `treadle models pull smollm2-135m` needs no hub",
        )
    return Check(name="hub", status="ok", reason="the Hugging Face hub answers")
