"""Is a task set worth training on? Checks without a model, in seconds.

    gold        the gold answer scores 1.0
    easy        empty, constant and echoed answers stay under a threshold (gcd of small numbers
                pays 27% for "1": a policy learns that before it learns to divide)
    wrong       a gold answer with one character changed does not score 1.0
    grader      deterministic; never raises; scores are finite, in [0, 1], and hold "score"
    leak        the answer is not written in what the model is shown
    texts       no text twice, no id twice, no text in two splits
    size        each split has tasks

A check fails, warns or passes, always with its numbers. What only may be a fault warns: an
answer that occurs in the prompt is wrong for a sum and right for "which word is longer".

Takes: a Taskset. Gives: TasksetReport.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from treadle.errors import DataError, RewardError, TaskError
from treadle.tasks.text import SPLITS, as_number, normalise
from treadle.types import Provenance, Task, Taskset

EASY_LIMIT = 0.2
"""Mean score that an answer given without looking at the task may have."""

Grade = Callable[[Task, str], Mapping[str, float]]

JUNK = (
    "\x00",
    "\x00\x01\x7f" * 20,
    "9" * 20_000,
    "a " * 50_000,
    "(" * 500,
    "\u202e\u0660\U0001f9f6 e\u0301 \ufffd\ud800",
    "[]",
    '{"answer": ',
    "NaN",
    "1e999",
    "-inf",
    "None",
    "1/0",
    "\n\n```\n```\n",
)
"""Replies that a grader must survive: NUL, huge, unbalanced, odd Unicode, odd numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    """What was found, with numbers."""
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksetReport:
    """The outcome of `validate`."""

    taskset: str
    provenance: Provenance
    num_tasks: int
    """How many were looked at."""
    sizes: Mapping[str, int | None]
    """Distinct tasks per split; None = too many to count."""
    checks: tuple[Check, ...]
    easy: Mapping[str, Mapping[str, float]]
    """Mean of each named score for answers given without looking at the task."""

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "checks": [asdict(c) for c in self.checks], "ok": self.ok}

    def rows(self) -> list[tuple[str, str, str]]:
        """(check, status, detail), for a table."""
        return [(check.name, check.status, check.detail) for check in self.checks]


def validate(
    taskset: Taskset,
    n: int = 60,
    *,
    split: str = "train",
    easy_limit: float = EASY_LIMIT,
    grade: Grade | None = None,
) -> TasksetReport:
    """Check a task set on its first `n` tasks.

    Args:
        taskset: Any source; nothing is changed in it.
        n: Tasks per check. The standard error of a rate is at most 0.5 / sqrt(n).
        split: Where the tasks are taken from; overlap is looked for in all splits.
        easy_limit: Mean score from which an answer given without looking fails the set.
        grade: Grades in place of `taskset.grade`, e.g. in a worker with a time limit: a grader
            that never returns would block a call without one.

    Raises:
        DataError, TaskError: the set has no task in the split.
    """
    grader = _Grader(grade or taskset.grade)
    tasks = _take(taskset, split, n)
    if not tasks:
        raise DataError(f"empty task set: {taskset.name} has no task in split `{split}`")
    golds = [(task, gold) for task in tasks if (gold := taskset.gold(task)) is not None]
    gradable = [task for task in tasks if grader.accepts(task)]
    easy = {}
    checks = [*_known_fault(taskset), _gold(golds, len(tasks), grader)]
    if gradable:
        easy = {k: _mean_scores(gradable, grader, reply) for k, reply in _easy_answers(golds)}
        checks += [
            *_easy(easy, easy_limit),
            _wrong(golds, grader),
            *_grader(gradable, golds, grader),
        ]
    sizes = {name: taskset.size(name) for name in SPLITS}
    checks += [*_leaks(golds), *_texts(taskset, tasks, split, n), _sizes(sizes, split)]
    return TasksetReport(
        taskset=taskset.name,
        provenance=taskset.provenance,
        num_tasks=len(tasks),
        sizes=sizes,
        checks=tuple(checks),
        easy=easy,
    )


class _Grader:
    """A grader whose exceptions are counted: a fault of one reply must not end the report."""

    def __init__(self, grade: Grade) -> None:
        self._grade = grade
        self.raised: list[str] = []

    def accepts(self, task: Task) -> bool:
        """False for a task that the set itself cannot grade (a row without an answer)."""
        try:
            self._grade(task, "")
        except RewardError:
            return False
        except Exception:
            return True
        return True

    def __call__(self, task: Task, reply: str) -> Mapping[str, float]:
        try:
            return self._grade(task, reply)
        except Exception as error:
            shown = repr(reply if len(reply) <= 12 else reply[:9] + "...")
            self.raised.append(f"{shown}: {type(error).__name__}: {error}"[:120])
            return {"score": 0.0}


# --------------------------------------------------------------------------- gold and easy answers


def _known_fault(taskset: Taskset) -> Iterable[Check]:
    fault = getattr(taskset, "known_fault", "")
    if fault:
        yield Check(name="known fault", status="warn", detail=fault)


def _gold(golds: list[tuple[Task, str]], num_tasks: int, grade: _Grader) -> Check:
    if not golds:
        return Check(
            name="gold scores 1.0",
            status="warn",
            detail=f"none of {num_tasks} tasks has a gold answer: the grader is unproven",
        )
    missed = [t.id for t, gold in golds if grade(t, gold).get("score") != 1.0]
    detail = f"{len(golds) - len(missed)} of {len(golds)} gold answers score 1.0"
    if missed:
        detail += f"; not {', '.join(missed[:3])}"
    return Check(
        name="gold scores 1.0",
        status="fail" if missed else "pass",
        detail=detail,
        value=1 - len(missed) / len(golds),
        limit=1.0,
    )


def _easy_answers(golds: list[tuple[Task, str]]) -> list[tuple[str, str | None]]:
    """Named answers that need no look at the task; None stands for the prompt itself."""
    answers: dict[str, str | None] = {"empty": "", "echo of the prompt": None}
    common = [gold for gold, _ in Counter(gold for _, gold in golds).most_common(2)]
    for answer in dict.fromkeys(["0", "1", *common]):
        shown = answer if len(answer) <= 20 else answer[:17] + "..."
        answers[f'always "{shown}"'] = answer
    return list(answers.items())


def _mean_scores(tasks: list[Task], grade: _Grader, answer: str | None) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for task in tasks:
        reply = task.messages[-1].content if answer is None else answer
        totals.update({k: v for k, v in grade(task, reply).items() if k != "grader_raised"})
    return {name: total / len(tasks) for name, total in totals.items()}


def _easy(easy: Mapping[str, Mapping[str, float]], limit: float) -> Iterable[Check]:
    """Rates that can be trained on fail; partial credit, which needs a function, warns."""
    for part in ("score", "lenient", "partial"):
        rates = {name: means[part] for name, means in easy.items() if part in means}
        if not rates:
            continue
        worst = max(rates, key=lambda name: rates[name])
        high = [
            f"{k} {v:.2f}" for k, v in sorted(rates.items(), key=lambda kv: -kv[1]) if v > limit
        ]
        yield Check(
            name=f"easy answers, {part}",
            status="pass" if not high else "warn" if part == "partial" else "fail",
            detail=f"over {limit:.2f}: {', '.join(high)}"
            if high
            else f"at most {rates[worst]:.2f} ({worst})",
            value=rates[worst],
            limit=limit,
        )


def _wrong(golds: list[tuple[Task, str]], grade: _Grader) -> Check:
    paid = [t.id for t, gold in golds if grade(t, mutated(gold)).get("score", 0.0) >= 1.0]
    share = len(paid) / len(golds) if golds else 0.0
    return Check(
        name="altered gold fails",
        status="pass" if not paid else "warn" if share <= 0.05 else "fail",
        detail=f"{len(paid)} of {len(golds)} altered gold answers score 1.0"
        + (f", e.g. {paid[0]}" if paid else ""),
        value=share,
        limit=0.05,
    )


def mutated(gold: str) -> str:
    """A near miss: the last digit plus one, else the last letter exchanged, else doubled."""
    for i in range(len(gold) - 1, -1, -1):
        if gold[i].isalnum() and gold[i].isascii():
            other = str((int(gold[i]) + 1) % 10) if gold[i].isdigit() else "x"
            return gold[:i] + (other if other != gold[i] else "y") + gold[i + 1 :]
    return gold + gold + "?"


# --------------------------------------------------------------------------- the grader


def _grader(tasks: list[Task], golds: list[tuple[Task, str]], grade: _Grader) -> Iterable[Check]:
    differing = sum(grade(t, gold) != grade(t, gold) for t, gold in golds)
    yield Check(
        name="grader is deterministic",
        status="fail" if differing else "pass",
        detail=f"{differing} of {len(golds)} answers graded twice got two scores",
        value=float(differing),
        limit=0.0,
    )
    unread = 0
    bad: list[str] = []
    for number, junk in enumerate(JUNK):
        scores = grade(tasks[number % len(tasks)], junk)
        unread += bool(scores.get("grader_raised"))
        # A chained comparison is False for NaN too.
        if "score" not in scores or not all(0 <= v <= 1 for v in scores.values()):
            bad.append(f"scores {dict(scores)} for {junk[:9]!r}")
    faults = grade.raised + bad
    detail = f"{len(JUNK)} junk replies graded, {unread} of them unreadable for a library's grader"
    if faults:
        detail = f"{len(grade.raised)} replies raised, {len(bad)} bad scores; {faults[0]}"
    yield Check(
        name="grader survives junk",
        status="fail" if faults else "pass",
        detail=detail,
        value=float(len(faults)),
        limit=0.0,
    )


# --------------------------------------------------------------------------- texts


def _leaks(golds: list[tuple[Task, str]]) -> Iterable[Check]:
    """Search what the model is shown for the answer: announced, plain, reversed, base64."""
    hits: Counter[str] = Counter()
    for task, gold in golds:
        shown = "\n".join(m.content for m in task.messages)
        for kind in leaks(shown, gold):
            hits[kind] += 1
    n = len(golds)
    told = hits["announced"] + hits["base64"]
    yield Check(
        name="answer not in the prompt",
        status="fail" if told else "warn" if hits["plain"] + hits["reversed"] else "pass",
        detail=f"of {n}: announced {hits['announced']}, base64 {hits['base64']}, "
        f"plain {hits['plain']}, reversed {hits['reversed']}",
        value=told / n if n else 0.0,
        limit=0.0,
    )


def leaks(shown: str, gold: str) -> list[str]:
    """How `gold` can be read off `shown`; short answers only count when they are announced.

    "announced": "the answer is GOLD", "solution: GOLD". "plain" and "reversed": as whole words,
    from 4 characters on (shorter ones occur by chance). "base64": of 6 characters or more.
    """
    text, gold = normalise(shown), normalise(gold)
    if not gold:
        return []
    found = []
    end = r"(?![\w]|\.\d)" if as_number(gold) is not None else r"(?!\w)"
    if re.search(rf"\b(?:answer|solution)(?: is| ?[:=])+\W{{0,3}}{re.escape(gold)}{end}", text):
        found.append("announced")
    if len(gold) >= 4:
        for kind, form in (("plain", gold), ("reversed", gold[::-1])):
            if re.search(rf"(?<!\w){re.escape(form)}(?!\w)", text):
                found.append(kind)
    if len(gold) >= 6:
        encoded = base64.b64encode(gold.encode("utf-8", "replace")).decode().rstrip("=")
        if encoded.casefold() in shown.casefold():
            found.append("base64")
    return found


def _texts(taskset: Taskset, tasks: list[Task], split: str, n: int) -> Iterable[Check]:
    texts = Counter(text_of(task) for task in tasks)
    ids = Counter(task.id for task in tasks)
    twice = sum(c - 1 for c in texts.values()) + sum(c - 1 for c in ids.values())
    merged = getattr(taskset, "num_duplicates", 0)
    conflicts = getattr(taskset, "conflicts", [])
    detail = f"{len(texts)} distinct texts and {len(ids)} ids in {len(tasks)} tasks"
    if merged:
        detail += f"; {merged} rows of the file repeat an earlier text and were merged"
    if conflicts:
        detail += f", {len(conflicts)} with another answer (lines {conflicts[0]})"
    yield Check(
        name="no text twice",
        status="fail" if twice else "warn" if merged else "pass",
        detail=detail,
        value=float(twice),
        limit=0.0,
    )
    by_split = {split: set(texts)}
    for other in SPLITS:
        if other != split:
            # A third is enough to see a common stream, and small splits cost many draws.
            by_split[other] = {text_of(task) for task in _take(taskset, other, -(-n // 3))}
    shared = sum(len(v) for v in by_split.values()) - len(set().union(*by_split.values()))
    yield Check(
        name="splits are disjoint",
        status="fail" if shared else "pass",
        detail=f"{shared} texts in two splits; looked at "
        + ", ".join(f"{len(v)} of {k}" for k, v in by_split.items()),
        value=float(shared),
        limit=0.0,
    )


def text_of(task: Task) -> str:
    """The text by which two tasks are the same: all but the system message, normalised."""
    return normalise("\n".join(m.content for m in task.messages if m.role != "system"))


def _sizes(sizes: Mapping[str, int | None], split: str) -> Check:
    empty = [name for name, size in sizes.items() if size == 0]
    shown = ", ".join(f"{k} {'many' if v is None else v}" for k, v in sizes.items())
    return Check(
        name="size",
        status="fail" if split in empty else "warn" if empty else "pass",
        detail=shown,
    )


def _take(taskset: Taskset, split: str, n: int) -> list[Task]:
    tasks: list[Task] = []
    for index in range(n):
        try:
            tasks.append(taskset.task(index, split))
        except IndexError:
            break
        except TaskError:
            if tasks or taskset.size(split) != 0:
                raise
            break
    return tasks
