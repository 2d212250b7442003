"""The thing a command is about: a run's newest checkpoint, or a model by name.

Guarantees: a name that can only have meant a run is never looked up as a hub id; the weights are
those that the label says, and their origin is in the provenance.

Takes: "runs/first-run", "smollm2-135m", a directory or a hub id. Gives: a policy that samples.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treadle import machine
from treadle.config import ModelConfig, RunConfig
from treadle.errors import ConfigError, did_you_mean
from treadle.types import Provenance

if TYPE_CHECKING:
    from treadle.models.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Target:
    label: str
    """The run directory's name, or the model's."""
    policy: Policy
    step: int
    """Optimiser steps behind the weights; 0 for a model."""
    config: RunConfig | None
    """Of the run; None for a model."""
    model: Provenance
    """Of the base."""
    weights: Provenance
    """Of what samples: the checkpoint, or the base itself."""


def is_run(spec: str | Path) -> bool:
    """Whether a ledger is there; a name that no file can have is none."""
    from treadle.store.layout import DATABASE

    try:
        return (Path(spec) / DATABASE).is_file()
    except (OSError, ValueError):
        return False


def existing_run(path: Path) -> Path:
    """The path, where a run or an evaluation is. Raises ConfigError with what lies beside it."""
    if not is_run(path):
        siblings = _siblings(path)
        raise ConfigError(
            f"there is no run {path}",
            hint=f"in {path.parent}: {did_you_mean(path.name, siblings)}"
            if siblings
            else "treadle runs list shows what there is",
        )
    return path


def _siblings(path: Path) -> list[str]:
    try:
        return [p.name for p in path.parent.glob("*") if is_run(p)]
    except OSError:
        return []


def run_config_of(spec: str) -> RunConfig | None:
    """The config of a run, None when `spec` names a model.

    Raises ConfigError: there is no such run, but runs lie beside it. StoreError: unreadable.
    """
    from treadle.store import Store

    path = Path(spec)
    if is_run(path):
        with Store.open(path, readonly=True) as store:
            return store.config()
    if not path.exists() and "/" in spec and (_siblings(path) or path.parts[:1] == ("runs",)):
        existing_run(path)
    return None


def open_run_policy(run_dir: Path) -> Target:
    """A run's newest complete checkpoint, in the dtype that this machine runs fastest.

    Raises as `weights.restore.open_policy`.
    """
    import torch

    from treadle.store import Store
    from treadle.weights.restore import open_policy

    probe = machine.probe()
    with Store.open(run_dir, readonly=True) as store:
        dtype = store.config().model.dtype
    name = probe.dtype if dtype == "auto" else dtype
    found = open_policy(run_dir, dtype=getattr(torch, name), device=probe.device)
    for reason in found.skipped:
        print(f"skipped {reason}", file=sys.stderr)
    checkpoint = Provenance(
        source=f"run {found.config.name}, step {found.checkpoint.step}",
        license=found.policy.loaded.provenance.license,
        sha256=found.checkpoint.sha256,
    )
    return Target(
        label=run_dir.resolve().name,
        policy=found.policy,
        step=found.checkpoint.step,
        config=found.config,
        model=found.policy.loaded.provenance,
        weights=checkpoint,
    )


def open_model(config: ModelConfig) -> Target:
    """A model as it is, without an adapter. Raises ModelError."""
    from treadle import api

    loaded = api.load_model(config)
    plain = RunConfig(model=replace(config, lora=None))
    return Target(
        label=Path(config.name).name,
        policy=api.policy_of(loaded, plain),
        step=0,
        config=None,
        model=loaded.provenance,
        weights=loaded.provenance,
    )
