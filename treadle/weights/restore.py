"""A run's state as a checkpoint, and back: the policy, the trainer, the whole run.

Guarantees: names, shapes and dtypes must all match, both ways, or nothing is touched; what is
restored is bit for bit what was saved; a step that the ledger never committed does not come back;
the base model is the one that the run recorded.

Takes: a Policy and a Trainer, or a run directory. Gives: checkpoints, or a Policy ready to sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from treadle.config import RunConfig
from treadle.errors import WeightsError
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.store import CheckpointRecord, Store
from treadle.types import Provenance
from treadle.weights import checkpoint
from treadle.weights.checkpoint import Loaded, Saved


class Stateful(Protocol):
    """A trainer, as far as a checkpoint looks at it."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicy:
    """The result of a run, or what it has reached so far."""

    policy: Policy
    config: RunConfig
    checkpoint: CheckpointRecord
    """`checkpoint.step` says how far the policy was trained."""
    skipped: tuple[str, ...]
    """Newer checkpoints that could not be used, and why."""


def save_run(
    run_dir: str | Path,
    step: int,
    policy: Policy,
    trainer: Stateful,
    *,
    keep: int,
    max_gib: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> Saved:
    """Save what a resumed run needs beside the ledger; see `checkpoint.save`.

    Args:
        more: further parts, e.g. the state of controllers, by a name of their own.
    """
    state = {"policy": policy_state(policy), "trainer": trainer.state_dict(), **(more or {})}
    return checkpoint.save(run_dir, step, state, keep=keep, max_gib=max_gib)


def restore_run(
    run_dir: str | Path, policy: Policy, trainer: Stateful, *, committed: int
) -> Loaded:
    """Bring policy and trainer to the newest good checkpoint of a committed step.

    Args:
        committed: the ledger's last step (`Frontier.step`). Newer checkpoints are removed: their
            steps will be made again. Steps from the checkpoint's to this one are the caller's to
            re-apply.

    Returns:
        The checkpoint and its state; without one, policy and trainer are as they were.

    Raises:
        WeightsError: it belongs to another model or other LoRA settings.
    """
    checkpoint.discard_newer(run_dir, committed)
    found = checkpoint.load_latest(run_dir, at_most=committed)
    if found.checkpoint is not None:
        restore_policy(policy, found.state["policy"])
        trainer.load_state_dict(found.state["trainer"])
    return found


def policy_state(policy: Policy) -> dict[str, Tensor]:
    """Copies of the fp32 masters by name, on the CPU; the base of an adapter is not in it."""
    return {
        name: p.detach().to("cpu", copy=True).contiguous()
        for name, p in policy.parameters().items()
    }


def restore_policy(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """The inverse of `policy_state`; refreshes the compute copies.

    Raises WeightsError naming the first tensor that is missing, unknown or of another shape.
    """
    parameters = policy.parameters()
    missing, unknown = sorted(set(parameters) - set(state)), sorted(set(state) - set(parameters))
    if missing or unknown:
        raise WeightsError(
            f"the checkpoint has {len(state)} tensors, the policy {len(parameters)}; missing "
            f"{missing[:1]}, unknown {unknown[:1]}",
            hint="open it with the model and LoRA settings of the run that saved it",
        )
    for name, parameter in parameters.items():
        found = state[name]
        if found.shape != parameter.shape or found.dtype != parameter.dtype:
            raise WeightsError(
                f"{name} is {tuple(found.shape)} {found.dtype} in the checkpoint and "
                f"{tuple(parameter.shape)} {parameter.dtype} in the policy",
                hint="open it with the model and LoRA settings of the run that saved it",
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    policy.refresh()


def check_base(policy: Policy, recorded: Provenance | None) -> None:
    """Raises WeightsError when the base weights are not those that the run recorded."""
    here = policy.loaded.provenance
    if recorded is None or not recorded.sha256 or not here.sha256:
        return
    if recorded.sha256 != here.sha256:
        raise WeightsError(
            f"the run was trained on {recorded.source} with weights {recorded.sha256[:12]}, but "
            f"{policy.loaded.path} holds {here.sha256[:12]}: an adapter fits its own base only",
            hint="restore the base model that the run used",
        )


def open_policy(
    run_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_context: int | None = None,
) -> RunPolicy:
    """The policy of a run at its newest complete checkpoint; works while the run goes on.

    Args:
        max_context: tokens per sequence that are wanted; None = as in the run.

    Raises StoreError: no run. ModelError: its base model is not here. WeightsError: no
    checkpoint, or it does not fit.
    """
    with Store.open(run_dir, readonly=True) as store:
        config, info = store.config(), store.info()
    # Not bounded by the ledger: the run may have gone on and pruned since it was read.
    found = checkpoint.load_latest(run_dir)
    if found.checkpoint is None:
        why = "; skipped " + "; ".join(found.skipped) if found.skipped else ""
        raise WeightsError(
            f"{run_dir} has no complete checkpoint yet{why}",
            hint="the first is saved after store.checkpoint_every steps and at the end",
        )
    base = load(config.model.name, max_context=max_context or config.model.max_context)
    policy = Policy(base, lora=config.model.lora, dtype=dtype, device=device, seed=config.seed)
    check_base(policy, info.provenance.get("model"))
    restore_policy(policy, found.state["policy"])
    return RunPolicy(
        policy=policy, config=config, checkpoint=found.checkpoint, skipped=found.skipped
    )
