"""Mixtures: exact shares, every task once per epoch, a pure function of the ordinal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.config import TasksConfig
from treadle.errors import ConfigError
from treadle.tasks import Mix, names_of, open_mix
from treadle.tasks.mix import weights
from treadle.types import Message, Provenance, Task


class Numbers:
    """A task set of `count` numbers that may not know its own size at first."""

    def __init__(self, name: str, count: int, *, shy: bool = False) -> None:
        self.name, self._count, self._shy = name, count, shy
        self.provenance = Provenance(source=name, license="Apache-2.0")

    def size(self, split: str) -> int | None:
        return None if self._shy else self._count

    def task(self, index: int, split: str = "train") -> Task:
        if index >= self._count:
            self._shy = False
            raise IndexError(index)
        message = Message(role="user", content=f"{self.name} {index}")
        return Task(id=str(index), taskset=self.name, messages=(message,), split=split)

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        return {"score": float(answer == task.id)}

    def gold(self, task: Task) -> str | None:
        return task.id


RATIOS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 9.0)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(RATIOS, st.integers(1, 400))
def test_after_any_number_of_draws_each_share_is_right_to_within_one(
    ratios: list[float], draws: int
) -> None:
    mix = Mix([Numbers(str(i), 10**9) for i in range(len(ratios))], ratios)
    exact = weights(ratios)
    counts = [0] * len(ratios)
    for ordinal in range(draws):
        source, visit = mix.draw(ordinal)
        assert visit == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, exact, strict=True):
            assert abs(count - (ordinal + 1) * weight / sum(exact)) < 1


def test_ratio_3_to_1_by_hand() -> None:
    mix = Mix([Numbers("a", 100), Numbers("b", 100)], [3, 1])
    sources = [mix.draw(i)[0] for i in range(8)]
    assert Counter(sources[:4]) == Counter(sources[4:]) == {0: 3, 1: 1}


def test_every_task_comes_once_per_epoch_and_then_in_another_order() -> None:
    mix = Mix([Numbers("a", 7), Numbers("b", 3)], [2, 1], seed=4)
    slots = [mix.locate(i) for i in range(63)]
    first = [s.index for s in slots if s.source == 0]
    epochs = [first[i : i + 7] for i in range(0, 42, 7)]
    assert epochs[0] == list(range(7)), "a task set's own order is already its shuffle"
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    assert [s.epoch for s in slots if s.source == 1] == [i // 3 for i in range(21)]


@given(st.integers(0, 200))
@settings(max_examples=20)
def test_the_task_of_an_ordinal_does_not_depend_on_what_was_asked_before(ordinal: int) -> None:
    def fresh(shy: bool) -> Mix:
        return Mix([Numbers("a", 5, shy=shy), Numbers("b", 11, shy=shy)], [1, 0.5], seed=1)

    walked = fresh(False)
    for i in range(ordinal):
        walked.task(i)
    assert walked.task(ordinal) == fresh(False).task(ordinal) == fresh(True).task(ordinal)
    assert walked.locate(ordinal) == fresh(True).locate(ordinal)


def test_an_ordinal_far_away_costs_no_walk() -> None:
    mix = Mix([Numbers("a", 5), Numbers("b", 5)], [1, 2])
    source, visit = mix.draw(3 * 10**15 + 1)
    assert source in (0, 1) and visit >= 10**15


def test_bad_ratios_and_equal_names_are_config_errors() -> None:
    for ratio in (-1.0, float("nan"), float("inf"), 1e-9):
        with pytest.raises(ConfigError, match="a ratio must be between"):
            Mix([Numbers("a", 5), Numbers("b", 5)], [1.0, ratio])
    with pytest.raises(ConfigError, match="same name"):
        Mix([Numbers("a", 5), Numbers("a", 5)])
    with pytest.raises(ConfigError, match="needs task sets"):
        Mix([])


def test_open_mix_names_its_sets_and_refuses_the_same_set_twice() -> None:
    pytest.importorskip("reasoning_gym")
    a = TasksConfig(source="reasoning_gym:gcd", ratio=2.0)
    b = TasksConfig(source="reasoning_gym:gcd", options={"max_value": 30})
    assert names_of([a, b]) == ("reasoning_gym:gcd", "reasoning_gym:gcd#2")
    mix = open_mix([a, b], seed=0)
    assert Counter(mix.task(i).taskset for i in range(6)) == {a.source: 4, a.source + "#2": 2}
    assert mix["reasoning_gym:gcd#2"] is mix.tasksets[1]
    with pytest.raises(ConfigError, match=r"tasks.0 and tasks.1 are the same .*\n.*ratio 4"):
        open_mix([a, a], seed=0)
    with pytest.raises(ConfigError, match="no task set is configured"):
        open_mix([], seed=0)
