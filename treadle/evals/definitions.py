"""What every number of a run means: definition, unit, good direction.

Guarantees: one table for the page, the docs and the tests; a metric that a run stores and this
table does not know is a failing test (B152).

Takes: the METRICS of the rooms. Gives: Definitions by metric name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONTROLLER: dict[str, str] = {
    "groups/trained": "groups that the step trained on",
    "groups/dropped": "groups finished since the step before that can teach nothing: equal "
    "rewards, nothing scored, every trajectory failed",
    "generate/tokens_per_s": "sampled tokens of the groups finished for this step, dropped ones "
    "included, over the seconds that the trainer waited for them",
    "time/generate_s": "wall clock from the end of the step before until the groups were there",
    "time/train_s": "wall clock of advantages, packing, forward, backward and update",
    "advantage/groups": "groups whose rewards were compared",
    "advantage/singleton_groups": "of these, groups in which one trajectory alone counts",
    "advantage/empty_groups": "of these, groups in which no trajectory counts",
    "advantage/zero_variance_groups": "of these, groups of two or more with equal rewards",
    "advantage/left_out_trajectories": "trajectories of these that are unscored, failed, aborted "
    "or without trained tokens",
    "groups/left_out": "groups that the step consumed and did not train, as their rewards spread "
    "least (learn.spread_keep); stored where that is on",
    "credit/masked_tokens": "trained tokens that credit took out of the mask: of sub-agents, of "
    "agents that were not judged, flagged in a good run; stored where credit is on",
    "credit/judged_groups": "groups whose passing rollouts shared their advantage by quality; "
    "stored where learn.credit.quality is on",
    "tasks/{taskset}_trained_groups": "of the groups that the step trained on, those of a task "
    "set; stored, as the next, where there are several task sets or a curriculum",
    "tasks/{taskset}_solved_frac": "as reward/solved_frac, of a task set alone",
    "tasks/{taskset}_retired": "tasks of a set that its curriculum never draws again, as they "
    "passed at tasks.N.curriculum.retire or above",
    "advantage/{party}_baseline": "running mean reward of a trained party after the step, which "
    "the next step subtracts; stored where the estimator has one",
    "teacher/kl_nats": "mean log mu - log pi_teacher of the trained tokens: an estimate of "
    "KL(policy || teacher) at what the policy sampled, which may be negative; absent without a "
    "teacher",
    "teacher/logprob_nats": "mean log pi_teacher of the trained tokens",
    "time/teacher_s": "wall clock of the teacher's scores, part of time/train_s",
}
"""Of a step as a whole: what the controller adds to the METRICS of rollout and train."""

STAGES: dict[str, str] = {
    "generate": "waiting for groups: sampling, tools and grading",
    "train": "advantages, packing, forward, backward, update",
    "commit": "the step's transaction, checkpoint and publication",
    "evaluate": "held-out questions",
}
"""Of the spans of a run. Synchronous stages do not overlap."""

_PART = "reward/{part}_mean"
_BASELINE = "advantage/{party}_baseline"

_FACTS: dict[str, tuple[str, str]] = {
    "rollout/num_groups": ("groups", "-"),
    "rollout/num_trajectories": ("trajectories", "-"),
    "reward/mean": ("reward", "up"),
    _PART: ("score", "up"),
    "reward/solved_frac": ("share", "up"),
    "reward/unscored_frac": ("share", "0"),
    "reward/zero_variance_frac": ("share", "down"),
    "rollout/finished_frac": ("share", "up"),
    "rollout/truncated_frac": ("share", "down"),
    "rollout/aborted_frac": ("share", "0"),
    "rollout/failed_frac": ("share", "0"),
    "rollout/sampled_tokens_mean": ("tokens", "-"),
    "rollout/sampled_tokens_min": ("tokens", "-"),
    "rollout/sampled_tokens_max": ("tokens", "-"),
    "rollout/sampled_tokens_sum": ("tokens", "-"),
    "rollout/prompt_tokens_mean": ("tokens", "-"),
    "rollout/turns_mean": ("turns", "-"),
    "rollout/duration_s_mean": ("s", "down"),
    "rollout/duration_s_max": ("s", "down"),
    "rollout/entropy_nats_mean": ("nats", "above 0"),
    "rollout/logprob_nats_mean": ("nats", "-"),
    "rollout/forks_sum": ("forks", "0"),
    "rollout/retries_sum": ("retries", "0"),
    "rollout/leaked_sessions_sum": ("sessions", "0"),
    "tools/calls_mean": ("calls", "-"),
    "tools/error_frac": ("share", "down"),
    "tools/unread_frac": ("share", "0"),
    "loss/total": ("reward", "-"),
    "loss/clipped_frac": ("share", "down"),
    "loss/ce_nats": ("nats", "down"),
    "loss/dropped_positive_frac": ("share", "down"),
    "loss/dropped_negative_frac": ("share", "down"),
    "grad/norm": ("1", "steady"),
    "optim/lr": ("1", "-"),
    "optim/updates": ("updates", "-"),
    "policy/entropy_nats": ("nats", "above 0"),
    "policy/kl_k3_nats": ("nats", "down"),
    "policy/logprob_diff_nats": ("nats", "0"),
    "ratio/mean": ("1", "1"),
    "ratio/max": ("1", "down"),
    "ratio/ess_frac": ("share", "1"),
    "lag/mean_versions": ("versions", "down"),
    "lag/max_versions": ("versions", "down"),
    "advantage/abs_mean": ("reward", "-"),
    "tokens/trained": ("tokens", "-"),
    "tokens/demonstrated": ("tokens", "-"),
    "tokens/packed": ("tokens", "-"),
    "batch/rows": ("rows", "-"),
    "batch/micro_batches": ("passes", "-"),
    "batch/oversized": ("micro-batches", "0"),
    "step/skipped_nonfinite": ("0 or 1", "0"),
    "time/pack_s": ("s", "down"),
    "time/forward_s": ("s", "down"),
    "time/backward_s": ("s", "down"),
    "time/optimizer_s": ("s", "down"),
    "parity/mean_abs_nats": ("nats", "down"),
    "parity/max_abs_nats": ("nats", "down"),
    "entropy/control": ("1", "-"),
    "entropy/target_nats": ("nats", "-"),
    "entropy/error_nats": ("nats", "0"),
    "entropy/at_limit_steps": ("steps", "0"),
    "entropy/chosen_frac": ("share", "-"),
    "kl/reference_k1_nats": ("nats", "-"),
    "kl/reference_k3_nats": ("nats", "-"),
    "kl/reference_row_nats": ("nats", "-"),
    "kl/beta": ("1", "-"),
    "loss/kl": ("reward", "-"),
    "loss/entropy": ("reward", "-"),
    "value/loss": ("reward^2", "down"),
    "value/explained_variance": ("1", "up"),
    "value/clipped_frac": ("share", "down"),
    "value/grad_norm": ("1", "steady"),
    "value/actor_frozen": ("0 or 1", "-"),
    "time/critic_s": ("s", "down"),
    "time/proximal_s": ("s", "down"),
    "collapse/retrieval_frac": ("share", "up"),
    "collapse/information_nats": ("nats", "up"),
    "collapse/num_pairs": ("rows", "-"),
    "collapse/at_chance": ("measurements", "0"),
    "time/collapse_s": ("s", "down"),
    "mismatch/measured_frac": ("share", "1"),
    "mismatch/rho_mean": ("1", "1"),
    "mismatch/rho_min": ("1", "up"),
    "mismatch/rho_max": ("1", "down"),
    "mismatch/k3_nats": ("nats", "down"),
    "staleness/ratio_mean": ("1", "1"),
    "staleness/ratio_max": ("1", "down"),
    "staleness/k3_nats": ("nats", "down"),
    "correction/weight_mean": ("1", "1"),
    "correction/ess_frac": ("share", "1"),
    "correction/dropped_positive_frac": ("share", "down"),
    "correction/dropped_negative_frac": ("share", "down"),
    "correction/rejected_rows": ("rows", "down"),
    "correction/rejected_rows_frac": ("share", "down"),
    "correction/rejected_tokens": ("tokens", "down"),
    "groups/trained": ("groups", "-"),
    "groups/dropped": ("groups", "down"),
    "groups/left_out": ("groups", "down"),
    "credit/masked_tokens": ("tokens", "-"),
    "credit/judged_groups": ("groups", "up"),
    "tasks/{taskset}_trained_groups": ("groups", "-"),
    "tasks/{taskset}_solved_frac": ("share", "up"),
    "tasks/{taskset}_retired": ("tasks", "up"),
    "generate/tokens_per_s": ("tokens/s", "up"),
    "time/generate_s": ("s", "down"),
    "time/train_s": ("s", "down"),
    "advantage/groups": ("groups", "-"),
    "advantage/singleton_groups": ("groups", "0"),
    "advantage/empty_groups": ("groups", "0"),
    "advantage/zero_variance_groups": ("groups", "down"),
    "advantage/left_out_trajectories": ("trajectories", "0"),
    "teacher/kl_nats": ("nats", "down"),
    "teacher/logprob_nats": ("nats", "up"),
    "time/teacher_s": ("s", "down"),
    _BASELINE: ("reward", "up"),
}
"""Unit; good direction: up, down, the wanted value, or "-" where neither is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """What a metric means."""

    text: str
    unit: str
    good: str
    """up | down | steady | a wanted value | "-": it informs and has no better direction."""

    def __str__(self) -> str:
        better = "" if self.good == "-" else f" Good: {self.good}."
        return f"{self.text}. Unit: {self.unit}.{better}"


def definitions() -> dict[str, Definition]:
    """Every metric that a run can store; `reward/{part}_mean` stands for all parts,
    `advantage/{party}_baseline` for all parties, and `tasks/{taskset}_...` for all task sets.

    Imports torch: the trainer's METRICS live beside the trainer.
    """
    from treadle.rollout.metrics import METRICS as ROLLOUT
    from treadle.train.metrics import METRICS as TRAIN

    return {
        name: _definition(text, *_FACTS[name])
        for name, text in {**ROLLOUT, **TRAIN, **CONTROLLER}.items()
    }


def _definition(text: str, unit: str, good: str) -> Definition:
    # Some rooms end their sentence with unit and direction, which have columns of their own.
    short = text.removesuffix(f"; {good}").removesuffix(f"; {unit}")
    return Definition(text=short, unit=unit, good=good)


def define(name: str, known: dict[str, Definition]) -> Definition | None:
    """The definition of a stored metric, or None when nobody has defined it."""
    if name in known:
        return known[name]
    if re.fullmatch(r"advantage/.+_baseline", name):
        return known[_BASELINE]
    if found := re.fullmatch(r"tasks/.+_(trained_groups|solved_frac|retired)", name):
        return known[f"tasks/{{taskset}}_{found[1]}"]
    return known[_PART] if re.fullmatch(r"reward/.+_mean", name) else None
