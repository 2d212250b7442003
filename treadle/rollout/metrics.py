"""Numbers of a set of groups, each with a definition, a unit and a good direction.

Guarantees: shares and lengths are over *all* trajectories, before anything is masked or dropped;
rewards are over the scored ones alone; a number that is not defined (a mean of nothing) is absent,
never 0 or NaN.

Takes: Groups. Gives: {metric name: float}; alarms as sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.types import Group, Source, Status, Trajectory

METRICS: dict[str, str] = {
    "rollout/num_groups": "groups in this set",
    "rollout/num_trajectories": "trajectories in this set, whatever became of them",
    "reward/mean": "mean reward of scored trajectories; up",
    "reward/{part}_mean": "mean of a named part of the reward over scored trajectories; up",
    "reward/solved_frac": "scored trajectories with a full strict score (part `score`, else the "
    "reward before rollout.overlong, >= 1); share of scored; up",
    "reward/unscored_frac": "finished or truncated trajectories without a reward; share of all; 0",
    "reward/zero_variance_frac": "groups whose scored rewards are all equal, among groups with "
    "two or more scored; share; down",
    "rollout/finished_frac": "ended by the model and the harness; share of all; up",
    "rollout/truncated_frac": "cut by a token, turn or context limit; share of all; down",
    "rollout/aborted_frac": "cancelled or past their time limit; share of all; 0",
    "rollout/failed_frac": "ended by an error; share of all; 0",
    "rollout/sampled_tokens_mean": "sampled tokens per trajectory that sampled any; tokens",
    "rollout/sampled_tokens_min": "smallest of these; tokens",
    "rollout/sampled_tokens_max": "largest of these; tokens",
    "rollout/sampled_tokens_sum": "sampled tokens of all trajectories; tokens",
    "rollout/prompt_tokens_mean": "tokens of the first prompt, per trajectory that has one; tokens",
    "rollout/turns_mean": "sampler calls per trajectory; turns",
    "rollout/duration_s_mean": "wall clock per trajectory, grading excluded; seconds; down",
    "rollout/duration_s_max": "longest of these; seconds; down",
    "rollout/entropy_nats_mean": "mean entropy of the distributions that tokens were sampled from, "
    "where the engine reports it; nats per token",
    "rollout/logprob_nats_mean": "mean behaviour logprob of sampled tokens; nats per token",
    "rollout/forks_sum": "new branches forced by a chat template that rewrites the past; 0",
    "rollout/retries_sum": "trajectories run again because the sampler failed; 0",
    "rollout/leaked_sessions_sum": "sessions that the sampler could not release; 0",
    "tools/calls_mean": "tool calls per trajectory; calls",
    "tools/error_frac": "calls answered with an error; share of calls; down",
    "tools/unread_frac": "trajectories with marks of tool calls in a turn from which none could "
    "be read; share of all; 0",
}
"""Definition; unit; good direction (up, down, or the wanted value), where there is one."""

MAX_TRUNCATED = 0.05
"""Share of truncated trajectories that passes without a word."""

TRUNCATED_STEPS = 3
"""Steps in a row above it that raise an alarm."""

TOLERANCE = 1e-6
"""Rewards closer than this share of the largest |reward| of their group count as equal."""


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The METRICS of these groups; keys that are not defined for them are left out."""
    all_ = [t for g in groups for t in g.trajectories]
    scored = [t for g in groups for t in g.scored]
    out: dict[str, float] = {
        "rollout/num_groups": float(len(groups)),
        "rollout/num_trajectories": float(len(all_)),
    }
    _mean(out, "reward/mean", [t.reward.value for t in scored if t.reward.value is not None])
    for part in sorted({p for t in scored for p in t.reward.parts}):
        values = [t.reward.parts[part] for t in scored if part in t.reward.parts]
        _mean(out, f"reward/{part}_mean", values)
    _mean(out, "reward/solved_frac", [t.reward.solved for t in scored])
    _mean(out, "reward/zero_variance_frac", [_flat(g) for g in groups if len(g.scored) >= 2])
    judged = (Status.FINISHED, Status.TRUNCATED)
    unscored = [t.status in judged and t.reward.value is None for t in all_]
    _mean(out, "reward/unscored_frac", unscored)
    for status in Status:
        _mean(out, f"rollout/{status}_frac", [t.status is status for t in all_])
    lengths = [t.num_sampled_tokens for t in all_ if t.num_sampled_tokens]
    _mean(out, "rollout/sampled_tokens_mean", lengths)
    if lengths:
        out["rollout/sampled_tokens_min"] = float(min(lengths))
        out["rollout/sampled_tokens_max"] = float(max(lengths))
    out["rollout/sampled_tokens_sum"] = float(sum(lengths))
    _mean(out, "rollout/prompt_tokens_mean", [n for t in all_ if (n := _prompt_tokens(t))])
    _mean(out, "rollout/turns_mean", [_count(t, "turns") for t in all_])
    durations = [t.duration_s for t in all_]
    _mean(out, "rollout/duration_s_mean", durations)
    if durations:
        out["rollout/duration_s_max"] = max(durations)
    sampled = [n for t in all_ for n in t.nodes if n.source is Source.SAMPLED]
    _mean(out, "rollout/entropy_nats_mean", [e for n in sampled for e in n.entropies])
    _mean(out, "rollout/logprob_nats_mean", [x for n in sampled for x in n.logprobs])
    for key in ("forks", "retries", "leaked_sessions"):
        out[f"rollout/{key}_sum"] = sum(_count(t, key) for t in all_)
    _mean(out, "tools/calls_mean", [t.tool_calls for t in all_])
    if calls := sum(t.tool_calls for t in all_):
        out["tools/error_frac"] = sum(t.tool_errors for t in all_) / calls
    _mean(out, "tools/unread_frac", [_count(t, "unread_tool_marks") > 0 for t in all_])
    return out


def alarms(groups: Sequence[Group]) -> list[str]:
    """What a person should hear about at once, as sentences; empty when all is well."""
    all_ = [t for g in groups for t in g.trajectories]
    out = []
    marks = sum(_count(t, "unread_tool_marks") for t in all_)
    if marks and not sum(t.tool_calls for t in all_):
        out.append(
            f"0 tool calls were read from {len(all_)} trajectories, although their texts hold "
            f"{marks:.0f} marks of tool calls: the model speaks a syntax that is not understood"
        )
    failed = [t for t in all_ if t.status in (Status.FAILED, Status.ABORTED)]
    if all_ and len(failed) == len(all_):
        first = failed[0].error
        cause = f"{first.kind}: {first.message}" if first is not None else failed[0].status
        out.append(f"all {len(all_)} trajectories failed or were aborted, the first by {cause}")
    return out


class CutShort:
    """Tells when many trajectories are cut, once it has lasted: training on them teaches noise."""

    def __init__(self) -> None:
        self._steps = 0

    def alarm(self, groups: Sequence[Group]) -> str:
        """A sentence when more than MAX_TRUNCATED of the trajectories of each of the last
        TRUNCATED_STEPS steps were cut by a limit, told once until it has been otherwise; else "".

        Args:
            groups: those that finished for a step. Nothing sampled = nothing said.
        """
        all_ = [t for g in groups if not g.demonstrated for t in g.trajectories]
        if not all_:
            return ""
        cut = sum(t.status is Status.TRUNCATED for t in all_)
        self._steps = self._steps + 1 if cut > MAX_TRUNCATED * len(all_) else 0
        if self._steps != TRUNCATED_STEPS:
            return ""
        return (
            f"{cut} of {len(all_)} trajectories were cut by a limit, and for {TRUNCATED_STEPS} "
            f"steps more than {MAX_TRUNCATED:.0%}: the end of an answer is what they do not learn. "
            "Raise rollout.max_new_tokens, or teach shorter answers with rollout.overlong"
        )


def _mean(out: dict[str, float], name: str, values: Iterable[float]) -> None:
    values = list(values)
    if values:
        out[name] = sum(values) / len(values)


def _flat(group: Group) -> bool:
    values = [t.reward.value for t in group.scored if t.reward.value is not None]
    return max(values) - min(values) <= TOLERANCE * max(abs(v) for v in values)


def _prompt_tokens(trajectory: Trajectory) -> int:
    total = 0
    for node in trajectory.nodes:
        if node.source is Source.SAMPLED:
            return total
        total += len(node.ids)
    return total


def _count(trajectory: Trajectory, key: str) -> float:
    return float(trajectory.info.get(key, 0))
