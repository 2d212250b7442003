"""Held-out questions side by side: what the model said before and what it says after.

Guarantees: only task sets whose two evaluations can be compared; the same run gives the same
choice, and it shows losses as well as gains.

Takes: the report's `eval`. Gives: questions with answers of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from treadle.evals.held_out import Questions, measure_of, scores_of
from treadle.evals.visible import one_line
from treadle.store import EvalRow, Store
from treadle.types import Task

SHOWN = 4
"""Questions of each kind, and samples of each question."""

Said = tuple[tuple[float | None, str], ...]
"""(score, answer) per sample; None = no verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One held-out question before and after."""

    taskset: str
    question: str
    gold: str
    before: Said
    after: Said
    change: float
    """Of its strict rate, or of its reward where the task set grades nothing."""


def answers(store: Store, evals: Mapping[str, Any]) -> tuple[list[Answers], list[Answers]]:
    """Questions whose strict rate rose most; and those where it fell most, or stayed lowest."""
    rows = store.evals()
    by_id = {row.id: row for row in rows}
    asked = Questions(store, rows)
    found: list[tuple[float, float, str, EvalRow, EvalRow]] = []
    for name in evals["gain"]["tasksets"]:
        first, second = (by_id[evals[side]["tasksets"][name]["id"]] for side in ("before", "after"))
        before, after = _rates(first), _rates(second)
        found += [
            (after[id] - before[id], after[id], id, first, second) for id in before if id in after
        ]
    rose = sorted((f for f in found if f[0] > 0), key=lambda f: (-f[0], -f[1], f[2]))
    rest = sorted((f for f in found if f[0] <= 0 and f[1] < 1), key=lambda f: f[:3])
    return [_answers(asked, *f) for f in rose[:SHOWN]], [_answers(asked, *f) for f in rest[:SHOWN]]


def gold_of(task: Task) -> str:
    """The reference answer, where the task carries one."""
    return one_line(str(task.data.get("answer", "")), 160)


def _rates(row: EvalRow) -> dict[str, float]:
    scores = scores_of(row)[measure_of(row)]
    scored = {id: [v for v in values if v is not None] for id, values in scores.items()}
    return {id: fmean(values) for id, values in scored.items() if values}


def _answers(
    asked: Questions, change: float, _: float, task_id: str, first: EvalRow, second: EvalRow
) -> Answers:
    task = asked.task(first.taskset, task_id)
    messages = () if task is None else task.messages
    return Answers(
        taskset=first.taskset,
        question=one_line(messages[-1].content, 400) if messages else task_id,
        gold="" if task is None else gold_of(task),
        before=_said(first, task_id),
        after=_said(second, task_id),
        change=change,
    )


def _said(row: EvalRow, task_id: str) -> Said:
    results = [r for r in row.results if r.task_id == task_id][:SHOWN]
    return tuple((r.score, one_line(r.answer, 240)) for r in results)
