"""What a reader of the numbers should know before believing them.

Guarantees: each sentence has its numbers; nothing is said when all is well.

Takes: a report without its warnings, and the run's events. Gives: sentences, worst first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.store import Event

_LIMITS: tuple[tuple[str, float, str], ...] = (
    (
        "truncated_frac",
        0.2,
        "{:.0%} of the trajectories of the last {} steps were cut by a limit; raise "
        "rollout.max_new_tokens, or teach shorter answers",
    ),
    (
        "zero_variance_frac",
        0.7,
        "{:.0%} of the groups of the last {} steps had equal rewards and taught nothing; make "
        "the tasks easier or harder, or the reward finer",
    ),
)
"""Curve, largest share that passes without a word, sentence of (share, steps)."""

_LAST_STEPS = 5

_MAX_KL_NATS = 0.05
"""Mean k3 between engine and trainer above which importance weights carry the step."""

_ALARMS = 3
"""Shown one by one."""

_MIN_QUESTIONS = 30
"""Below this many questions an interval by Student's t is rough."""


def warnings_of(report: Mapping[str, Any], events: Sequence[Event]) -> list[str]:
    """Sentences about the run, its held-out numbers and its training."""
    return [
        *_ending(report),
        *_measuring(report["eval"]),
        *_training(report),
        *_alarms(events),
    ]


def _ending(report: Mapping[str, Any]) -> list[str]:
    status, cause, steps = report["status"], report["cause"], report["steps"]
    # An evaluation has no steps.
    what, done = "evaluation", ""
    if steps["wanted"]:
        what, done = "run", f"; {steps['done']} of {steps['wanted']} steps are done"
    if status == "failed":
        return [f"the {what} failed{done}: {cause}"]
    if status == "interrupted":
        return [f"the {what} was interrupted{done}" + (f": {cause}" if cause else "")]
    if status == "running":
        return [f"the {what} is still going{done}"]
    return []


def _measuring(evals: Mapping[str, Any]) -> list[str]:
    out = []
    before, after, gain = evals["before"], evals["after"], evals["gain"]
    out += overlap(evals["overlap_with_training"], evals["overlap_examples"])
    if gain["reason"] and not evals["alone"]:
        out.append(f"there is no before/after gain: {gain['reason']}")
    for label, side in (("before", before), ("after", after)):
        for row in side["tasksets"].values():
            out += of_evaluation(row, "" if evals["alone"] else f" {label}")
    if evals["alone"] and after["mean"] is not None:
        out += rough(after["n"])
    by_reward = [name for name, row in after["tasksets"].items() if row["reward"]]
    if by_reward:
        left_out = "" if after["measure"] == "reward" else ", and is in no mean over task sets"
        out.append(
            f"{', '.join(by_reward)} cannot grade its tasks: what is shown is the mean of the "
            f"reward that trained, and says what it says{left_out}"
        )
    if gain["mean"] is not None:
        out.extend(_reading(gain))
    return out


def overlap(num: int, examples: Sequence[str]) -> list[str]:
    """Of questions that the evaluated weights were trained on."""
    if not num:
        return []
    return [
        f"{num} held-out questions were also trained on, by text: the numbers are not held-out "
        f"ones ({'; '.join(examples)})"
    ]


def rough(num: int) -> list[str]:
    """Of an interval over so many questions."""
    if num >= _MIN_QUESTIONS:
        return []
    return [f"only {num} distinct held-out questions: the intervals are rough"]


def of_evaluation(row: Mapping[str, Any], when: str = "") -> list[str]:
    """Of one evaluation (`held_out`): what its rates leave out. `when`: " before", " after"."""
    out = []
    if row["error_share"]:
        cause = f"; mostly: {row['cause']}" if row["cause"] else ""
        out.append(
            f"{row['error_share']:.1%} of the answers{when} on {row['taskset']} have no verdict "
            f"and are left out{cause}"
        )
    if row["ungraded"]:
        out.append(
            f"{row['ungraded']} of {row['n']} questions{when} on {row['taskset']} are ones that "
            "the task set cannot grade: the rates leave them out"
        )
    return out


def _reading(gain: Mapping[str, Any]) -> list[str]:
    out = rough(gain["n"])
    (low, high), loose, measure = gain["ci95"], gain["lenient"], gain["measure"]
    if low is not None and low <= 0 <= high:
        out.append(f"the {measure} gain cannot be told from 0: {low:+.3f} to {high:+.3f}")
    if low is not None and low > 0 and loose["ci95"][0] is not None and loose["ci95"][0] <= 0:
        out.append(
            f"the strict rate rose by {gain['mean']:.3f}, the lenient one by {loose['mean']:.3f} "
            f"({loose['ci95'][0]:+.3f} to {loose['ci95'][1]:+.3f}): the model learnt the form of "
            "an answer, not to answer better"
        )
    if low is not None and high < 0:
        out.append(f"the model got worse: {gain['mean']:+.3f} ({low:+.3f} to {high:+.3f})")
    return out


def _training(report: Mapping[str, Any]) -> list[str]:
    out = []
    train, steps = report["train"], report["steps"]
    if steps["skipped"]:
        first = next(reason for reason in train["skipped"] if reason is not None)
        out.append(f"{steps['skipped']} of {steps['done']} steps were skipped, first: {first}")
    for curve, limit, sentence in _LIMITS:
        values = [v for v in train[curve][-_LAST_STEPS:] if v is not None]
        if values and (share := sum(values) / len(values)) > limit:
            out.append(sentence.format(share, len(values)))
    kls = [v for v in train["kl_k3_nats"] if v is not None]
    lags = [v for v in train["lag_versions"] if v is not None]
    if kls and not any(lags) and max(kls) > _MAX_KL_NATS:
        out.append(
            f"engine and trainer disagree: mean k3 up to {max(kls):.3g} nats at lag 0 (limit "
            f"{_MAX_KL_NATS})"
        )
    total, unscored = report["trajectories"]["total"], report["trajectories"]["unscored"]
    if unscored:
        kinds = ", ".join(f"{n} x {k}" for k, n in report["trajectories"]["errors"].items())
        out.append(
            f"{unscored} of {total} training trajectories have no reward"
            + (f" ({kinds})" if kinds else "")
        )
    return out


def _alarms(events: Sequence[Event]) -> list[str]:
    """The first alarms, and how many there were."""
    alarms = [e.data for e in events if e.kind == "alarm"]
    shown = [f"step {a.get('step')}: {a.get('message')}" for a in alarms[:_ALARMS]]
    rest = len(alarms) - len(shown)
    return [*shown, f"{rest} more alarms after these"] if rest else shown
