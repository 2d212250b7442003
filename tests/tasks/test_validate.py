"""What `validate` finds, and what it lets pass."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.config import TasksConfig
from treadle.errors import DataError
from treadle.tasks import open_taskset, validate
from treadle.tasks.jsonl import Jsonl
from treadle.tasks.reasoning_gym import ReasoningGym
from treadle.tasks.validate import TasksetReport, leaks, mutated
from treadle.types import Task


def status(report: TasksetReport, name: str) -> str:
    return next(check.status for check in report.checks if check.name == name)


@pytest.fixture
def additions(tmp_path: Path) -> Callable[..., Jsonl]:
    def make(count: int = 80, **more: Any) -> Jsonl:
        path = tmp_path / "sums.jsonl"
        rows = [{"prompt": f"{i} + {i * 7} =", "answer": str(i * 8), **more} for i in range(count)]
        path.write_text("\n".join(map(json.dumps, rows)))
        return Jsonl(path)

    return make


class Wrapped:
    """A task set with another grader."""

    def __init__(self, inner: Jsonl, grade: Callable[[Task, str], Mapping[str, float]]) -> None:
        self._inner, self.grade = inner, grade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_sound_set_passes_every_check(additions: Callable[..., Jsonl]) -> None:
    report = validate(additions())
    assert report.ok
    assert {check.status for check in report.checks} == {"pass"}
    assert report.num_tasks == 60
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert all(len(row) == 3 for row in report.rows())


def test_small_divisors_pay_for_a_constant_answer() -> None:
    """gcd of two numbers up to 30 pays about a third for "1"."""
    pytest.importorskip("reasoning_gym")
    taskset = ReasoningGym("gcd", options={"max_numbers": 2, "max_value": 30}, seed=7)
    report = validate(taskset)
    assert not report.ok
    assert status(report, "easy answers, score") == "fail"
    assert report.easy['always "1"']["score"] > 0.2
    assert validate(taskset, easy_limit=0.6).ok


def test_easy_sums_pass_and_a_grader_that_pays_for_anything_is_found() -> None:
    pytest.importorskip("reasoning_gym")
    good = open_taskset(
        TasksConfig(source="reasoning_gym:chain_sum", options={"max_terms": 2, "max_digits": 2}),
        7,
    )
    assert validate(good).ok
    report = validate(ReasoningGym("coin_flip", seed=7), n=40)
    assert not report.ok
    assert status(report, "known fault") == "warn"
    assert report.easy['always "0"']["score"] > 0.9


def test_a_family_without_gold_answers_says_that_its_grader_is_unproven() -> None:
    pytest.importorskip("reasoning_gym")
    report = validate(ReasoningGym("rush_hour"), n=8)
    assert status(report, "gold scores 1.0") == "warn"


@pytest.mark.parametrize(
    ("grade", "check"),
    [
        (lambda task, answer: {"score": 0.5}, "gold scores 1.0"),
        (lambda task, answer: {"score": 1.0}, "altered gold fails"),
        (lambda task, answer: {"score": 1.0}, "easy answers, score"),
        (lambda task, answer: {"score": 1 / len(answer.strip())}, "grader survives junk"),
        (lambda task, answer: {"score": float("nan")}, "grader survives junk"),
        (lambda task, answer: {"score": 1.5}, "grader survives junk"),
        (lambda task, answer: {"other": 1.0}, "grader survives junk"),
    ],
)
def test_a_faulty_grader_fails_by_name(
    additions: Callable[..., Jsonl],
    grade: Callable[[Task, str], Mapping[str, float]],
    check: str,
) -> None:
    report = validate(Wrapped(additions(), grade))
    assert status(report, check) == "fail"
    assert not report.ok
    json.dumps(report.to_dict())


def test_a_grader_that_changes_its_mind_is_found(additions: Callable[..., Jsonl]) -> None:
    calls = iter(range(10**9))
    report = validate(Wrapped(additions(), lambda task, answer: {"score": next(calls) % 2}))
    assert status(report, "grader is deterministic") == "fail"


def test_rows_without_answers_are_not_graded_by_the_check(additions: Callable[..., Jsonl]) -> None:
    report = validate(additions(answer=None))
    assert report.ok
    assert status(report, "gold scores 1.0") == "warn"
    assert report.easy == {}


def test_one_answer_for_all_and_an_echoed_answer_are_found(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"prompt": f"Is {i} prime? The answer is no.", "answer": "no"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    report = validate(Jsonl(path))
    assert report.easy['always "no"']["score"] == 1.0
    assert report.easy["echo of the prompt"]["lenient"] == 1.0
    assert status(report, "answer not in the prompt") == "fail"


def test_an_empty_split_is_an_error_or_a_warning(additions: Callable[..., Jsonl]) -> None:
    report = validate(additions(split="train"))
    assert report.ok and status(report, "size") == "warn"
    with pytest.raises(DataError, match="empty task set"):
        validate(additions(split="val"))


def test_texts_that_come_twice_or_in_two_splits_fail(additions: Callable[..., Jsonl]) -> None:
    inner = additions(split="train")

    class Repeating(Wrapped):
        def task(self, index: int, split: str = "train") -> Task:
            return inner.task(index % 10)

    report = validate(Repeating(inner, inner.grade))
    assert status(report, "no text twice") == "fail"
    assert status(report, "splits are disjoint") == "fail"


def test_answers_readable_in_the_prompt() -> None:
    """B137: plain, reversed, base64, and announced."""
    code = base64.b64encode(b"open sesame").decode()
    assert leaks("say open sesame!", "open sesame") == ["plain"]
    assert leaks("emases nepo", "Open Sesame") == ["reversed"]
    assert leaks(f"key {code}", "open sesame") == ["base64"]
    assert leaks("Answer: 12. What is 7 + 5?", "12") == ["announced"]
    assert leaks("the answer is 120", "12") == []
    assert leaks("12 + 0 =", "12") == [], "short answers occur by chance"
    assert leaks("(Answer Yes or No)", "Yes") == []
    assert leaks("anything", "") == []


def test_a_mutated_answer_differs() -> None:
    assert [mutated(x) for x in ("12", "9", "yes", "max", "[]", "")] == [
        "13", "0", "yex", "may", "[][]?", "?",
    ]  # fmt: skip
