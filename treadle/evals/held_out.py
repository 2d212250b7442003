"""Before and after: what the held-out questions say about a run.

Guarantees:
- before = the finished evaluation of step 0, after = that of the last committed step, over all
  task sets; what is missing or partial has no mean and says why, it is never replaced (B121);
- an evaluation directory (`treadle eval`) has one side, `after`: its newest evaluation, whatever
  the step of the weights that answered;
- a gain is paired per question, and refused where the two sides asked different questions or
  asked them differently;
- what a task set graded and what a reward function paid for are never blended: the strict and
  the lenient rate are of the questions that the set graded, and a set that grades none has a mean
  `reward` in their place. Means over task sets are of rates as long as there is one;
- `n` counts distinct questions by text, over all task sets together;
- every number carries its settings (B155);
- questions that were also trained on, by text, are counted.

The strict rate is the task set's own score. The lenient rate reads the same answers leniently
("7 + 5 = 12." says 12); a task set without a lenient reading counts there with its strict one. A
gain in both is skill; a gain in the strict rate alone is a learnt format.

Takes: a Store. Gives: JSON values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from treadle.config import TasksConfig
from treadle.errors import StoreError
from treadle.evals import EVALUATED
from treadle.evals.statistics import Estimate, Scores, average, paired_gain, rate
from treadle.evals.visible import one_line, quoted
from treadle.store import EvalResult, EvalRow, Store
from treadle.tasks.mix import names_of
from treadle.tasks.validate import text_of
from treadle.types import Task

Measure = Literal["strict", "lenient", "reward"]

MEASURES: tuple[Measure, ...] = get_args(Measure)

Pair = tuple[EvalRow | None, EvalRow | None]
"""Before and after."""

NOTHING = average([])
"""The estimate of nothing: no mean, n = 0."""


def held_out(store: Store) -> dict[str, Any]:
    """before, after, gain, every evaluation, and the overlap with the training prompts."""
    info = store.info()
    config, rows = info.config, store.evals()
    names = taskset_names(config, rows)
    asked = Questions(store, rows)
    last = store.frontier().step
    pairs: dict[str, Pair]
    if alone := EVALUATED in info.provenance:
        last = max((row.step for row in rows), default=0)
        pairs = {name: (None, _newest(rows, name, last, config)) for name in names}
        before = _side({}, 0, asked)
    else:
        pairs = {name: _pair(rows, name, last, config) for name in names}
        before = _side({n: p[0] for n, p in pairs.items()}, 0, asked)
    after = _side({n: p[1] for n, p in pairs.items()}, last, asked)
    if alone:
        before["reason"] = "an evaluation has one side; treadle eval --compare RUN gives a gain"
    elif last == 0:
        after["reason"] = "no step is committed yet"
    if not rows and not config.get("eval", {}).get("questions"):
        before["reason"] = after["reason"] = "evaluations are off (eval.questions is 0)"
    overlap = told_overlap(store) if alone else None
    if overlap is None:
        overlap = overlapping(asked.texts([r for r in rows if r.taskset in names]), store)
    return {
        "alone": alone,
        "before": before,
        "after": after,
        "gain": _gain(pairs, before, after, asked),
        "all": [evaluation(row) for row in rows],
        "overlap_with_training": len(overlap),
        "overlap_examples": overlap[:3],
    }


OVERLAP = "overlap with training"
"""The event of an evaluation directory that holds `overlapping` with the run evaluated."""


def told_overlap(store: Store) -> list[str] | None:
    """What `treadle eval` found out, the last time."""
    told = [event.data["questions"] for event in store.events() if event.kind == OVERLAP]
    return told[-1] if told else None


def overlapping(texts: Iterable[str], trained: Store) -> list[str]:
    """Question texts (`text_of`) that a run was also prompted with, sorted."""
    texts = set(texts)
    if not texts:
        return []
    # One ordinal per task: a task that comes again has the same text.
    first = {(p.taskset, p.task_id): p.ordinal for p in reversed(trained.prompts())}
    return sorted(texts & {text_of(trained.task(ordinal)) for ordinal in first.values()})


def taskset_names(config: Mapping[str, Any], rows: Sequence[EvalRow]) -> list[str]:
    """Task sets that a complete evaluation covers: the configured ones, where any of them was
    evaluated; else (task sets that Python code made) those that were."""
    tasks = [TasksConfig(source=t["source"]) for t in config.get("tasks", ())]
    named = zip(names_of(tasks), tasks, strict=True)
    configured = [name for name, t in named if not t.demonstrates]
    evaluated = list(dict.fromkeys(row.taskset for row in rows))
    if evaluated and not set(configured) & set(evaluated):
        return evaluated
    return configured


def measure_of(row: EvalRow) -> Measure:
    """What the answers of a task set were judged by: its own grading, or a reward function."""
    judged = [r for r in row.results if r.score is not None]
    return "strict" if not judged or any("score" in r.parts for r in judged) else "reward"


def scores_of(row: EvalRow) -> dict[Measure, Scores]:
    """Scores by what they are, question id -> one of each sample; None = no verdict.

    "strict": the task set's own score, of the questions that it graded; "lenient": the same
    questions read leniently, where the set has such a reading; or else "reward" alone.
    """
    if measure_of(row) == "reward":
        return {"reward": _scores(row, lambda r: r.score)}
    out: dict[Measure, Scores] = {"strict": _scores(row, lambda r: r.parts.get("score"))}
    if any("lenient" in r.parts for r in row.results):
        out["lenient"] = _scores(
            row, lambda r: r.parts.get("lenient", r.parts["score"]) if "score" in r.parts else None
        )
    return out


def _scores(row: EvalRow, read: Callable[[EvalResult], float | None]) -> Scores:
    scores: dict[str, list[float | None]] = {}
    for result in row.results:
        scored = None if result.score is None else read(result)
        scores.setdefault(result.task_id, []).append(scored)
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

    def texts(self, rows: Sequence[EvalRow]) -> set[str]:
        """Of all questions of these evaluations."""
        return {self.text(row.taskset, r.task_id) for row in rows for r in row.results}


# --------------------------------------------------------------------------- one side


def _at(rows: Sequence[EvalRow], name: str, step: int, config: Mapping[str, Any]) -> list[EvalRow]:
    """The evaluations of a task set at a step, the one to be preferred last."""
    split = config.get("eval", {}).get("split")
    temperature = config.get("rollout", {}).get("temperature")

    def preference(row: EvalRow) -> tuple[bool, bool, int]:
        usual = (row.split, row.temperature) == (split, temperature)
        return row.finished, usual, row.id

    return sorted((r for r in rows if r.taskset == name and r.step == step), key=preference)


def _newest(
    rows: Sequence[EvalRow], name: str, step: int, config: Mapping[str, Any]
) -> EvalRow | None:
    found = _at(rows, name, step, config)
    return found[-1] if found else None


def _pair(rows: Sequence[EvalRow], name: str, last: int, config: Mapping[str, Any]) -> Pair:
    """The evaluations of a task set that belong together, at step 0 and at the last step."""
    if last == 0:
        return _newest(rows, name, 0, config), None
    first, final = _at(rows, name, 0, config), _at(rows, name, last, config)
    for a in reversed(first):
        for b in reversed(final):
            if a.finished and b.finished and not differences(a, b):
                return a, b
    return (first[-1] if first else None), (final[-1] if final else None)


def differences(
    a: EvalRow, b: EvalRow, texts: tuple[set[str], set[str]] | None = None
) -> list[str]:
    """Why two evaluations of a task set cannot be compared, as sentences.

    `texts`: what was asked by either, to say in which questions they differ.
    """
    out = []
    if a.data_hash != b.data_hash:
        out.append("the questions differ" + (_questions_apart(*texts) if texts else ""))
    left = {"split": a.split, "temperature": a.temperature, **a.settings}
    right = {"split": b.split, "temperature": b.temperature, **b.settings}
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            out.append(f"{key} differs ({left.get(key)} and {right.get(key)})")
    return out


def _questions_apart(a: set[str], b: set[str]) -> str:
    """As ": 3 are in the first only ("7 + 5", ...), 1 in the second ("gcd of ...")"."""
    parts = [
        f"{len(only)} {'is' if len(only) == 1 else 'are'} in the {which} only "
        f"({', '.join(quoted(one_line(text), 60) for text in sorted(only)[:2])}"
        f"{', ...' if len(only) > 2 else ''})"
        for which, only in (("first", a - b), ("second", b - a))
        if only
    ]
    return ": " + (", ".join(parts) or "the same texts with other answers, or in another order")


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
        "tasksets": {name: evaluation(row) for name, row in done.items()},
        "partial": {name: evaluation(row) for name, row in partial.items()},
        "step": step,
        **_common_settings(list(done.values())),
    }


def _rates(rows: Mapping[str, EvalRow], *, complete: bool, asked: Questions) -> dict[str, Any]:
    """Mean over the task sets that grade; over the others where none does."""
    measures: dict[str, Measure] = {name: measure_of(row) for name, row in rows.items()}
    measure = _measure(measures.values())
    nothing = NOTHING.to_dict()
    if not complete:
        return {**nothing, "measure": measure, "lenient": nothing}
    scores = {name: scores_of(rows[name]) for name in rows if measures[name] == measure}
    strict = {name: of[measure] for name, of in scores.items()}
    lenient = {name: of.get("lenient", of[measure]) for name, of in scores.items()}
    return {
        **_mean(strict, asked),
        "measure": measure,
        "lenient": _mean(lenient, asked) if _reads_leniently(scores.values()) else nothing,
    }


def _measure(measures: Iterable[Measure]) -> Measure:
    """Of a mean: rewards are averaged only where nothing is graded."""
    return "reward" if set(measures) == {"reward"} else "strict"


def _reads_leniently(scores: Iterable[Mapping[Measure, Any]]) -> bool:
    return any("lenient" in of for of in scores)


def _mean(scores: Mapping[str, Scores], asked: Questions) -> dict[str, object]:
    """Equal weight for each task set; n over their union."""
    n = asked.distinct({name: _judged(of) for name, of in scores.items()})
    return replace(average(map(rate, scores.values())), n=n).to_dict()


def evaluation(row: EvalRow) -> dict[str, Any]:
    """One stored evaluation with its settings."""
    tokens = [r.num_sampled for r in row.results]
    rates: dict[Measure, Estimate] = {part: rate(of) for part, of in scores_of(row).items()}
    return {
        **_by_measure(rates),
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
        "cause": _cause(row),
        "ungraded": num_ungraded(row),
        "settings": dict(row.settings),
    }


def _by_measure(estimates: Mapping[Measure, Estimate]) -> dict[str, Any]:
    """All measures, null where there is none."""
    return {m: estimates[m].to_dict() if m in estimates else None for m in MEASURES}


def num_ungraded(row: EvalRow) -> int:
    """Questions with a verdict of the reward alone, left out of the rates of a set that grades
    others."""
    if measure_of(row) == "reward":
        return 0
    judged = [r for r in row.results if r.score is not None]
    graded = {r.task_id for r in judged if "score" in r.parts}
    return len({r.task_id for r in judged} - graded)


def _cause(row: EvalRow) -> str:
    """Why most of the answers without a verdict have none."""
    causes = Counter(r.error.message for r in row.results if r.score is None and r.error)
    return causes.most_common(1)[0][0] if causes else ""


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
    pairs: Mapping[str, Pair],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    asked: Questions,
) -> dict[str, Any]:
    """After minus before, paired per question; each task set that allows it, and their mean."""
    reasons = list(dict.fromkeys(s["reason"] for s in (before, after) if s["reason"]))
    gains: dict[str, dict[Measure, Estimate]] = {}
    judged: dict[str, set[str]] = {}
    for name, (a, b) in pairs.items():
        if a is None or b is None or not (a.finished and b.finished):
            continue
        found = differences(a, b)
        if found:
            found = differences(a, b, (asked.texts([a]), asked.texts([b])))
        if not found and measure_of(a) != measure_of(b):
            found = [f"the measure differs ({measure_of(a)} and {measure_of(b)})"]
        if found:
            reasons.append(f"{name}: {', '.join(found)}")
            continue
        one, two = scores_of(a), scores_of(b)
        gains[name] = {part: paired_gain(one[part], two[part]) for part in one if part in two}
        measure = measure_of(a)
        judged[name] = _judged(one[measure]) & _judged(two[measure])
    measure = _measure("strict" if "strict" in of else "reward" for of in gains.values())
    whole, loose = NOTHING, NOTHING
    if gains and not reasons:
        used = {name: of for name, of in gains.items() if measure in of}
        n = asked.distinct({name: judged[name] for name in used})
        whole = replace(average(of[measure] for of in used.values()), n=n)
        if _reads_leniently(used.values()):
            loose = average(of.get("lenient", of[measure]) for of in used.values())
            loose = replace(loose, n=n)
    return {
        **whole.to_dict(),
        "measure": measure,
        "lenient": loose.to_dict(),
        "reason": "; ".join(reasons),
        "tasksets": {name: _by_measure(of) for name, of in gains.items()},
    }


def _judged(scores: Scores) -> set[str]:
    return {q for q, values in scores.items() if any(v is not None for v in values)}
