"""Before and after: what the held-out questions say about a run.

Guarantees:
- before = the finished evaluation of step 0, after = that of the last committed step, over all
  task sets; what is missing or partial has no mean and says why, it is never replaced (B121);
- a gain is paired per question, and refused where the two sides asked different questions or
  asked them differently;
- `n` counts distinct questions by text, over all task sets together;
- every number carries its settings (B155);
- questions that were also trained on, by text, are counted.

The strict rate is the task set's own score. The lenient rate reads the same answers leniently
("7 + 5 = 12." says 12); a task set without a lenient reading counts there with its strict one. A
gain in both is skill; a gain in the strict rate alone is a learnt format.

Takes: a Store. Gives: JSON values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.config import TasksConfig
from treadle.errors import StoreError
from treadle.evals.statistics import Estimate, Scores, average, paired_gain, rate
from treadle.store import EvalRow, Store
from treadle.tasks.mix import names_of
from treadle.tasks.validate import text_of
from treadle.types import Task

NOTHING = average([])
"""The estimate of nothing: no mean, n = 0."""


def held_out(store: Store) -> dict[str, Any]:
    """before, after, gain, every evaluation, and the overlap with the training prompts."""
    config = store.info().config
    rows = store.evals()
    names = taskset_names(config, rows)
    last = store.frontier().step
    asked = Questions(store, rows)
    pairs = {name: _pair(rows, name, last, config) for name in names}
    before = _side({n: p[0] for n, p in pairs.items()}, 0, asked)
    after = _side({n: p[1] for n, p in pairs.items()}, last, asked)
    if last == 0:
        after["reason"] = "no step is committed yet"
    if not rows and not config.get("eval", {}).get("questions"):
        before["reason"] = after["reason"] = "evaluations are off (eval.questions is 0)"
    overlap = asked.overlap([r for r in rows if r.taskset in names])
    return {
        "before": before,
        "after": after,
        "gain": _gain(pairs, before, after, asked),
        "all": [_evaluation(row) for row in rows],
        "overlap_with_training": len(overlap),
        "overlap_examples": overlap[:3],
    }


def taskset_names(config: Mapping[str, Any], rows: Sequence[EvalRow]) -> list[str]:
    """Task sets that a complete evaluation covers: the configured ones, where any of them was
    evaluated; else (task sets that Python code made) those that were."""
    configured = names_of([TasksConfig(source=t["source"]) for t in config.get("tasks", ())])
    evaluated = list(dict.fromkeys(row.taskset for row in rows))
    if evaluated and not set(configured) & set(evaluated):
        return evaluated
    return list(configured)


def strict_scores(row: EvalRow) -> Scores:
    """Question id -> the task set's own score of each sample; None = no verdict."""
    return _scores(row, lambda score, parts: score)


def lenient_scores(row: EvalRow) -> Scores | None:
    """The same by the lenient reading; None when the task set has none."""
    if not any("lenient" in result.parts for result in row.results):
        return None
    return _scores(row, lambda score, parts: None if score is None else parts.get("lenient"))


def _scores(row: EvalRow, read: Callable[[float | None, Mapping[str, float]], Any]) -> Scores:
    scores: dict[str, list[float | None]] = {}
    for result in row.results:
        scores.setdefault(result.task_id, []).append(read(result.score, result.parts))
    return scores


class Questions:
    """The tasks behind the evaluations, read once each; equal ids of a set mean equal text."""

    def __init__(self, store: Store, rows: Sequence[EvalRow]) -> None:
        self._store = store
        self._known: dict[tuple[str, str], Task | None] = {}
        self._places: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for row in rows:
            for result in row.results:
                key = (row.taskset, result.task_id)
                self._places.setdefault(key, []).append((row.id, result.sample))

    def task(self, taskset: str, task_id: str) -> Task | None:
        """None when no readable answer to it is stored."""
        key = (taskset, task_id)
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def _read(self, key: tuple[str, str]) -> Task | None:
        for eval_id, sample in self._places.get(key, ()):
            try:
                return self._store.eval_trajectory(eval_id, key[1], sample).task
            except StoreError:
                continue
        return None

    def text(self, taskset: str, task_id: str) -> str:
        """What makes two questions the same."""
        task = self.task(taskset, task_id)
        return f"\0{taskset}\0{task_id}" if task is None else text_of(task)

    def distinct(self, questions: Mapping[str, set[str]]) -> int:
        """Distinct texts of question ids by task set."""
        return len({self.text(name, id) for name, ids in questions.items() for id in ids})

    def overlap(self, rows: Sequence[EvalRow]) -> list[str]:
        """Texts of evaluated questions that the run was also prompted with, sorted."""
        asked = {self.text(row.taskset, r.task_id) for row in rows for r in row.results}
        if not asked:
            return []
        # One ordinal per task: a task that comes again has the same text.
        first = {(p.taskset, p.task_id): p.ordinal for p in reversed(self._store.prompts())}
        trained = {text_of(self._store.task(ordinal)) for ordinal in first.values()}
        return sorted(asked & trained)


# --------------------------------------------------------------------------- one side


def _pair(
    rows: Sequence[EvalRow], name: str, last: int, config: Mapping[str, Any]
) -> tuple[EvalRow | None, EvalRow | None]:
    """The evaluations of a task set that belong together, at step 0 and at the last step."""
    split = config.get("eval", {}).get("split")
    temperature = config.get("rollout", {}).get("temperature")

    def preference(row: EvalRow) -> tuple[bool, bool, int]:
        usual = (row.split, row.temperature) == (split, temperature)
        return row.finished, usual, row.id

    first = sorted((r for r in rows if r.taskset == name and r.step == 0), key=preference)
    final = sorted((r for r in rows if r.taskset == name and r.step == last), key=preference)
    if last == 0:
        return (first[-1] if first else None), None
    for a in reversed(first):
        for b in reversed(final):
            if a.finished and b.finished and not differences(a, b):
                return a, b
    return (first[-1] if first else None), (final[-1] if final else None)


def differences(a: EvalRow, b: EvalRow) -> list[str]:
    """Why two evaluations of a task set cannot be compared, as sentences."""
    out = []
    if a.data_hash != b.data_hash:
        out.append(f"the questions differ (data hash {a.data_hash} and {b.data_hash})")
    left = {"split": a.split, "temperature": a.temperature, **a.settings}
    right = {"split": b.split, "temperature": b.temperature, **b.settings}
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            out.append(f"{key} differs ({left.get(key)} and {right.get(key)})")
    return out


def _side(rows: Mapping[str, EvalRow | None], step: int, asked: Questions) -> dict[str, Any]:
    """One evaluation over all task sets; without a mean when a part of it is missing."""
    done = {n: r for n, r in rows.items() if r is not None and r.finished}
    missing = [n for n, r in rows.items() if r is None]
    partial = {n: r for n, r in rows.items() if r is not None and not r.finished}
    reasons = []
    if missing:
        reasons.append(f"step {step} was not evaluated on {', '.join(missing)}")
    for name, row in partial.items():
        reasons.append(
            f"the evaluation of step {step} on {name} was cut off after {len(row.results)} answers"
        )
    out = _rates(done, complete=not reasons and bool(rows), asked=asked)
    if not reasons and out["n"] == 0:
        reasons.append("no answer has a verdict" if rows else "no task set was evaluated")
    return {
        **out,
        "reason": "; ".join(reasons),
        "tasksets": {name: _evaluation(row) for name, row in done.items()},
        "partial": {name: _evaluation(row) for name, row in partial.items()},
        "step": step,
        **_common_settings(list(done.values())),
    }


def _rates(rows: Mapping[str, EvalRow], *, complete: bool, asked: Questions) -> dict[str, Any]:
    if not complete:
        return {**NOTHING.to_dict(), "lenient": NOTHING.to_dict()}
    strict = {name: strict_scores(row) for name, row in rows.items()}
    lenient = {name: lenient_scores(row) or strict[name] for name, row in rows.items()}
    return {
        **_mean(strict, asked),
        "lenient": _mean(lenient, asked),
    }


def _mean(scores: Mapping[str, Scores], asked: Questions) -> dict[str, object]:
    """Equal weight for each task set; n over their union."""
    n = asked.distinct({name: _judged(of) for name, of in scores.items()})
    return replace(average(map(rate, scores.values())), n=n).to_dict()


def _evaluation(row: EvalRow) -> dict[str, Any]:
    """One stored evaluation with its settings."""
    lenient = lenient_scores(row)
    tokens = [r.num_sampled for r in row.results]
    return {
        "strict": rate(strict_scores(row)).to_dict(),
        "lenient": None if lenient is None else rate(lenient).to_dict(),
        "sampled_tokens_mean": sum(tokens) / len(tokens) if tokens else None,
        "id": row.id,
        "taskset": row.taskset,
        "step": row.step,
        "version": row.version,
        "finished": row.finished,
        "split": row.split,
        "temperature": row.temperature,
        "k": row.k,
        "n": row.n,
        "data_hash": row.data_hash,
        "error_share": row.error_share,
        "own_score": _own_score(row),
        "settings": dict(row.settings),
    }


def _own_score(row: EvalRow) -> bool:
    """Whether the task set graded it. Where it cannot, the run's reward is the score."""
    judged = [r for r in row.results if r.score is not None]
    return not judged or any("score" in r.parts for r in judged)


def _common_settings(rows: Sequence[EvalRow]) -> dict[str, Any]:
    """Settings of an evaluation over several task sets; None where they differ between sets."""

    def common(values: Sequence[Any]) -> Any:
        return values[0] if values and all(v == values[0] for v in values) else None

    answers = sum(len(r.results) for r in rows)
    unscored = sum(r.score is None for row in rows for r in row.results)
    return {
        "version": common([r.version for r in rows]),
        "split": common([r.split for r in rows]),
        "temperature": common([r.temperature for r in rows]),
        "k": min((r.k for r in rows), default=0),
        "data_hash": "+".join(r.data_hash for r in rows),
        "error_share": unscored / answers if answers else None,
    }


# --------------------------------------------------------------------------- gain


def _gain(
    pairs: Mapping[str, tuple[EvalRow | None, EvalRow | None]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    asked: Questions,
) -> dict[str, Any]:
    """After minus before, paired per question; each task set that allows it, and their mean."""
    reasons = list(dict.fromkeys(s["reason"] for s in (before, after) if s["reason"]))
    strict: dict[str, Estimate] = {}
    lenient: dict[str, Estimate] = {}
    tasksets: dict[str, Any] = {}
    judged: dict[str, set[str]] = {}
    for name, (a, b) in pairs.items():
        if a is None or b is None or not (a.finished and b.finished):
            continue
        if found := differences(a, b):
            reasons.append(f"{name}: {', '.join(found)}")
            continue
        one, two = strict_scores(a), strict_scores(b)
        strict[name] = lenient[name] = paired_gain(one, two)
        judged[name] = _judged(one) & _judged(two)
        loose = lenient_scores(a), lenient_scores(b)
        if loose[0] is not None and loose[1] is not None:
            lenient[name] = paired_gain(loose[0], loose[1])
        tasksets[name] = {
            "strict": strict[name].to_dict(),
            "lenient": None if lenient[name] is strict[name] else lenient[name].to_dict(),
        }
    if reasons:
        strict, lenient = {}, {}
    n = asked.distinct(judged) if strict else 0
    return {
        **replace(average(strict.values()), n=n).to_dict(),
        "lenient": replace(average(lenient.values()), n=n).to_dict(),
        "reason": "; ".join(reasons),
        "tasksets": tasksets,
    }


def _judged(scores: Scores) -> set[str]:
    return {q for q, values in scores.items() if any(v is not None for v in values)}
