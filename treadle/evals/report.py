"""The report of a run as JSON values: what `treadle report RUN --json` prints.

Guarantees: everything is read from the store alone, so any process can report on a run that is
being written, has failed or has not begun; a number that is not there is null, never 0; what is
wrong with the numbers stands beside them in `warnings`.

    run, name, status, cause     where it is and how it ended
    go_on                        what to type to go on with it
    steps                        done, wanted, skipped
    model, tasks, provenance     what was trained on what, and under which terms
    eval                         before, after, gain, all, overlap (held_out)
    train                        one value per step of each curve
    timing, tokens, groups       what it cost and what became of the prompts
    tasksets                     the same of each task set, with its pass rate and retired tasks
    warnings                     sentences

Takes: a Store. Gives: a dict of JSON values; `as_text` makes it readable.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from treadle.evals import EVALUATED, STARTED_BY
from treadle.evals.cautions import warnings_of
from treadle.evals.held_out import held_out
from treadle.evals.terminal import as_text
from treadle.store import RunInfo, Span, StepRow, Store, TrajectoryRow
from treadle.store.lock import writer

__all__ = ["CURVES", "as_text", "summarise"]

CURVES: dict[str, str] = {
    "reward": "reward/mean",
    "strict": "reward/score_mean",
    "lenient": "reward/lenient_mean",
    "zero_variance_frac": "reward/zero_variance_frac",
    "ce_nats": "loss/ce_nats",
    "teacher_kl_nats": "teacher/kl_nats",
    "entropy_nats": "policy/entropy_nats",
    "sampled_tokens_mean": "rollout/sampled_tokens_mean",
    "truncated_frac": "rollout/truncated_frac",
    "grad_norm": "grad/norm",
    "kl_k3_nats": "policy/kl_k3_nats",
    "lag_versions": "lag/mean_versions",
    "tokens_per_s": "generate/tokens_per_s",
}
"""Curve of the report -> metric of axis "train" (docs/metrics.md)."""


def summarise(store: Store) -> dict[str, Any]:
    """The whole report. Raises StoreError when the ledger cannot be read."""
    info, steps = store.info(), store.steps()
    status, cause = status_of(store, info)
    trajectories = store.trajectories()
    stages = {k: round(v, 3) for k, v in store.seconds_by_stage().items()}
    sampled = sum(t.num_sampled for t in trajectories)
    generating = stages.get("generate")
    spans = store.spans()
    report: dict[str, Any] = {
        "run": str(store.run_dir),
        "name": info.config.get("name"),
        "status": status,
        "cause": cause,
        "go_on": go_on(info, store.run_dir),
        "steps": {
            "done": len(steps),
            "wanted": max(_steps_wanted(info), len(steps)),
            "skipped": sum(s.skipped for s in steps),
        },
        "model": info.config.get("model"),
        "tasks": info.config.get("tasks"),
        "provenance": {role: asdict(p) for role, p in info.provenance.items()},
        "eval": held_out(store),
        "train": _train(steps),
        "timing": {
            "created_at": info.created_at,
            "wall_s": _wall(info, spans),
            "stages_s": stages,
            "step_s_median": _step_median(spans),
            "sessions": len(info.sessions),
            "resumes": max(0, len(info.sessions) - 1),
        },
        "tokens": {
            "sampled": sampled,
            "trained": int(sum(s.metrics.get("tokens/trained", 0.0) for s in steps)),
            "demonstrated": int(sum(s.metrics.get("tokens/demonstrated", 0.0) for s in steps)),
            "eval_sampled": sum(r.num_sampled for row in store.evals() for r in row.results),
            "sampled_per_s": sampled / generating if sampled and generating else None,
        },
        "groups": _groups(store),
        "tasksets": _tasksets(store, trajectories, steps),
        "trajectories": {
            "total": len(trajectories),
            "by_status": dict(Counter(t.status for t in trajectories)),
            "demonstrated": sum(t.demonstrated for t in trajectories),
            "unscored": sum(t.reward is None and not t.demonstrated for t in trajectories),
            "errors": dict(Counter(t.error.kind for t in trajectories if t.error is not None)),
        },
    }
    report["warnings"] = warnings_of(report, store.events())
    return report


def _steps_wanted(info: RunInfo) -> int:
    return 0 if EVALUATED in info.provenance else int(info.config.get("steps", 0))


def status_of(store: Store, info: RunInfo) -> tuple[str, str]:
    """(status, cause): a run that says it is running and has no writer was killed."""
    status = info.status
    cause = info.sessions[-1].cause if info.sessions else ""
    if status == "running" and writer(store.run_dir) is None:
        return "interrupted", cause or "its process was killed"
    return status, cause


def go_on(info: RunInfo, run_dir: Path) -> str:
    """What to type, or to call, to go on with a run that has stopped: as it was begun last.

    "" where it cannot be gone on with.
    """
    began = [str(s.facts[STARTED_BY]) for s in info.sessions if STARTED_BY in s.facts]
    if not began:
        return "the command that began it, with --resume (or td.train with resume=True)"
    if began[-1] == "td.train":
        return f"td.train(..., run_dir={str(run_dir)!r}, resume=True)"
    if began[-1] == "td.open_run":
        return ""
    return f"{began[-1]} --run-dir {shlex.quote(str(run_dir))} --resume"


def _train(steps: Sequence[StepRow]) -> dict[str, list[Any]]:
    """Curves by name, all as long as `step`; named parts of the reward as `part/NAME`."""
    known = set(CURVES.values())
    parts = sorted(
        {
            name
            for s in steps
            for name in s.metrics
            if name.startswith("reward/") and name.endswith("_mean") and name not in known
        }
    )
    named = CURVES | {f"part/{name[len('reward/') : -len('_mean')]}": name for name in parts}
    out: dict[str, list[Any]] = {
        "step": [s.step for s in steps],
        "skipped": [s.reason if s.skipped else None for s in steps],
    }
    for curve, metric in named.items():
        out[curve] = [finite(s.metrics.get(metric)) for s in steps]
    return out


def finite(value: float | None) -> float | None:
    """None for what JSON cannot say."""
    return None if value is None or not math.isfinite(value) else value


def _wall(info: RunInfo, spans: Sequence[Span]) -> float:
    """Seconds that processes worked on the run; a killed one until its last stored span."""
    total = 0.0
    starts = [s.started_at for s in info.sessions]
    for session, following in zip(info.sessions, [*starts[1:], math.inf], strict=True):
        end = session.ended_at
        if end is None or session.status == "interrupted":
            ends = [
                s.started_at + s.duration_s
                for s in spans
                if session.started_at <= s.started_at < following
            ]
            end = max(ends, default=session.started_at)
        total += max(0.0, end - session.started_at)
    return round(total, 3)


def _step_median(spans: Sequence[Span]) -> float | None:
    """Median seconds of a step, evaluations not counted."""
    seconds: dict[int, float] = {}
    for span in spans:
        if span.stage != "evaluate":
            seconds[span.step] = seconds.get(span.step, 0.0) + span.duration_s
    return median(seconds.values()) if seconds else None


def _groups(store: Store) -> dict[str, Any]:
    prompts = store.prompts()
    states: Mapping[str, int] = Counter(p.state for p in prompts)
    reasons = Counter(p.reason for p in prompts if p.reason)
    left_out = sum(p.state == "trained" and bool(p.reason) for p in prompts)
    return {
        "started": len(prompts),
        "trained": states.get("trained", 0) - left_out,
        "dropped": states.get("dropped", 0),
        "left_out": left_out,
        "waiting": states.get("published", 0),
        "in_flight": states.get("started", 0) + states.get("returned", 0),
        "reasons": dict(reasons.most_common()),
    }


def _tasksets(
    store: Store, trajectories: Sequence[TrajectoryRow], steps: Sequence[StepRow]
) -> dict[str, dict[str, Any]]:
    """What became of the groups of each task set, and how its rollouts fared, first and last."""
    out: dict[str, dict[str, Any]] = {}
    states = Counter((p.taskset, p.state) for p in store.prompts())
    for name in sorted({taskset for taskset, _ in states}):
        scored = [t for t in trajectories if t.taskset == name and t.scored]
        solved = f"tasks/{name}_solved_frac"
        curve = [s.metrics[solved] for s in steps if solved in s.metrics]
        retired = steps[-1].metrics.get(f"tasks/{name}_retired") if steps else None
        out[name] = {
            "started": sum(n for (taskset, _), n in states.items() if taskset == name),
            "trained": states[name, "trained"],
            "dropped": states[name, "dropped"],
            "solved_frac": sum(t.passed for t in scored) / len(scored) if scored else None,
            "solved_frac_first": curve[0] if curve else None,
            "solved_frac_last": curve[-1] if curve else None,
            "retired": None if retired is None else int(retired),
        }
    return out
