"""`doctor` is one JSON document whose warnings all say what to do."""

import dataclasses
import json

from treadle import doctor
from treadle.machine import facts


def test_every_check_has_a_reason_and_every_warning_a_hint(monkeypatch, tmp_path):
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = json.loads(json.dumps(doctor.doctor(network=True)))
    checks = {c["name"]: c for c in report["checks"]}
    assert {"dtype", "threads", "memory", "compiler", "cache", "models", "hub"} <= set(checks)
    assert all(c["reason"] for c in checks.values())
    assert all(bool(c["hint"]) == (c["status"] == "warn") for c in checks.values())
    assert checks["hub"]["status"] == "warn"
    assert "HF_HUB_OFFLINE" in checks["hub"]["reason"]
    assert report["ok"] is False
    assert report["probe"]["dtype"] in ("float32", "bfloat16")
    assert {"smollm2-135m", "tiny-random"} <= {m["name"] for m in report["models"]}


def test_without_network_the_hub_is_not_asked():
    assert "hub" not in {c["name"] for c in doctor.doctor()["checks"]}


def test_a_busy_machine_is_a_warning_with_its_load():
    now = dataclasses.replace(facts(), cores=2, load=(5.25, 4.0, 3.0))
    busy = doctor._load(now)
    assert (busy.status, bool(busy.hint)) == ("warn", True)
    assert busy.reason.startswith("load average 5.2 on 2 usable cores: ")
    quiet = doctor._load(dataclasses.replace(now, load=(2.0, 9.0, 9.0)))
    assert (quiet.status, quiet.hint) == ("ok", "")


def test_an_old_or_missing_package_is_a_warning_with_the_command():
    old = dataclasses.replace(facts(), versions={"torch": "2.4.1+cpu", "transformers": ""})
    torch, transformers = doctor._packages(old)
    assert (torch.status, transformers.status) == ("warn", "warn")
    assert torch.hint == "pip install 'torch>=2.11'"
    assert transformers.reason.startswith("not installed")
