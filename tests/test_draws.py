"""The task stream of a run: minima, curricula, and draws that a crash does not change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.test_mix import Numbers
from treadle.config import CurriculumConfig, RolloutConfig, RunConfig, TasksConfig, override
from treadle.draws import Draws, Ended
from treadle.errors import ConfigError, ContractError, DataError
from treadle.store import PromptRow, TrajectoryRow
from treadle.tasks import Mix
from treadle.types import Task


def stream(
    cfgs: list[TasksConfig], sizes: list[int], *, groups: int, eta: int = 0, seed: int = 0
) -> Draws:
    tasksets = [Numbers(str(i), size) for i, size in enumerate(sizes)]
    mix = Mix(tasksets, [cfg.ratio for cfg in cfgs], seed=seed)
    return Draws(mix, cfgs, groups_per_step=groups, eta=eta, seed=seed)


def drive(
    draws: Draws,
    fate: Callable[[int, Task], Ended],
    *,
    groups: int,
    steps: int,
    order: random.Random,
) -> tuple[list[Task], list[list[int]], dict[int, Ended]]:
    """A synchronous run that finishes groups in a random order: tasks by ordinal, the ordinals of
    each step, and how the groups ended."""
    tasks: list[Task] = []
    ended: dict[int, Ended] = {}
    batches: list[list[int]] = []
    running: list[int] = []
    ready: list[int] = []
    while len(batches) < steps:
        while len(running) + len(ready) < groups and draws.ready(len(tasks)):
            running.append(len(tasks))
            tasks.append(draws.task(len(tasks)))
            if order.random() < 0.3:
                break
        assert running or len(ready) == groups, "the stream waits for nobody"
        if len(ready) == groups:
            batches.append(sorted(ready))
            ready = []
            continue
        done = running.pop(order.randrange(len(running)))
        ended[done] = fate(done, tasks[done])
        draws.ended(done, ended[done])
        if not ended[done].dropped:
            ready.append(done)
    return tasks, batches, ended


def by_luck(seed: int, rate: float) -> Callable[[int, Task], Ended]:
    """A function of the ordinal, as a group's rewards are."""

    def fate(ordinal: int, task: Task) -> Ended:
        rng = random.Random(f"{seed}/{ordinal}/{task.id}/{task.taskset}")
        return Ended(dropped=rng.random() < rate, passed=rng.randrange(9), scored=8)

    return fate


MIXES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans()), min_size=2, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(MIXES, st.integers(0, 4), st.floats(0, 0.6), st.integers(0, 10**6))
def test_every_step_has_the_minimum_of_each_set_whatever_is_dropped_and_whoever_is_first(
    mix: list[tuple[int, int, bool]], spare: int, rate: float, seed: int
) -> None:
    cfgs = [TasksConfig(source=str(i), ratio=r, minimum=m) for i, (r, m, _) in enumerate(mix)]
    groups = sum(c.minimum for c in cfgs) + spare or 1
    found = []
    for finish in (1, 2):
        draws = stream(cfgs, [10**6] * len(cfgs), groups=groups)
        found.append(
            drive(draws, by_luck(seed, rate), groups=groups, steps=4, order=random.Random(finish))
        )
    tasks, batches, _ = found[0]
    for batch in batches:
        counts = Counter(tasks[o].taskset for o in batch)
        assert all(counts[str(i)] >= cfg.minimum for i, cfg in enumerate(cfgs)), (counts, cfgs)
    assert found[0][0] == found[1][0], "which task comes depends on who finished first"
    assert found[0][1] == found[1][1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 2))
def test_without_minima_shares_are_right_to_within_one_draw(
    ratios: list[int], groups: int, eta: int
) -> None:
    curriculum = CurriculumConfig()
    cfgs = [TasksConfig(source=str(i), ratio=r) for i, r in enumerate(ratios)]
    cfgs[0] = replace(cfgs[0], curriculum=curriculum)
    draws = stream(cfgs, [10**4] * len(cfgs), groups=groups, eta=eta)
    counts = Counter[str]()
    for ordinal in range(60):
        assert draws.ready(ordinal)
        counts[draws.task(ordinal).taskset] += 1
        draws.ended(ordinal, Ended(dropped=False, passed=4, scored=8))
        for i, ratio in enumerate(ratios):
            assert abs(counts[str(i)] - (ordinal + 1) * ratio / sum(ratios)) < 1


def test_a_minimum_by_hand() -> None:
    """Ratio 9 to 1, steps of 4, at least 1 of the second: the last free place is kept for it."""
    cfgs = [TasksConfig(source="a", ratio=9), TasksConfig(source="b", minimum=1)]
    draws = stream(cfgs, [100, 100], groups=4)
    tasks, batches, _ = drive(
        draws,
        lambda ordinal, task: Ended(dropped=ordinal == 3, passed=1, scored=2),
        groups=4,
        steps=2,
        order=random.Random(0),
    )
    # Ordinal 3 is dropped; if it was of the second set, so is what comes in its place.
    sets = [task.taskset for task in tasks]
    assert sets[:4].count("1") == 1
    assert [sets[o] for o in batches[0]].count("1") == 1
    assert [sets[o] for o in batches[1]].count("1") == 1


def test_run_ahead_keeps_the_minimum_among_every_n_draws_and_waits_for_nobody() -> None:
    cfgs = [TasksConfig(source="a", ratio=20), TasksConfig(source="b", minimum=2)]
    draws = stream(cfgs, [100, 100], groups=5, eta=1)
    assert all(draws.ready(i) for i in range(40))
    sets = [draws.task(i).taskset for i in range(40)]
    assert all(sets[i : i + 5].count("1") == 2 for i in range(0, 40, 5))


# --------------------------------------------------------------------------- resume


def rows_of(
    tasks: list[Task], batches: list[list[int]], ended: dict[int, Ended], cut: int
) -> tuple[list[PromptRow], list[TrajectoryRow]]:
    """What a ledger holds when the process dies as `cut` ordinals have been started."""
    step = {o: s for s, batch in enumerate(batches, 1) for o in batch}
    prompts, trajectories = [], []
    for ordinal, task in enumerate(tasks[:cut]):
        how = ended.get(ordinal)
        state = "returned" if how is None else "dropped" if how.dropped else "trained"
        prompts.append(
            PromptRow(
                ordinal=ordinal,
                taskset=task.taskset,
                task_id=task.id,
                split="train",
                state=state,
                attempts=1,
                version=0,
                step=step.get(ordinal),
                reason="",
                started_at=0.0,
                ended_at=None,
            )
        )
        for i in range(0 if how is None else how.scored):
            trajectories.append(
                TrajectoryRow(
                    id=f"{ordinal}/{i}",
                    ordinal=ordinal,
                    sample=i,
                    taskset=task.taskset,
                    task_id=task.id,
                    status="finished",
                    reward=float(i < how.passed) if how else None,
                    parts={},
                    error=None,
                    stop_reason="eos",
                    num_tokens=3,
                    num_sampled=2,
                    num_trained=2,
                    num_turns=1,
                    version_min=0,
                    version_max=0,
                    duration_s=0.0,
                    tool_calls=0,
                    tool_errors=0,
                    state=state,
                    step=step.get(ordinal),
                    advantage=None,
                )
            )
    return prompts, trajectories


@settings(max_examples=40, deadline=None)
@given(MIXES, st.floats(0, 0.5), st.integers(0, 10**6), st.integers(0, 10))
def test_a_run_that_is_cut_anywhere_draws_the_same_tasks_at_the_same_ordinals(
    mix: list[tuple[int, int, bool]], rate: float, seed: int, at: int
) -> None:
    """Curricula, minima and drops together, played on from the stored rows alone."""
    cfgs = [
        TasksConfig(source=str(i), ratio=r, minimum=m, curriculum=CurriculumConfig() if c else None)
        for i, (r, m, c) in enumerate(mix)
    ]
    groups = sum(c.minimum for c in cfgs) + 1
    sizes = [30] * len(cfgs)
    fate = by_luck(seed, rate)
    order = random.Random(seed)
    whole = drive(
        stream(cfgs, sizes, groups=groups, seed=3), fate, groups=groups, steps=4, order=order
    )
    tasks, batches, ended = whole
    cut = min(at, len(tasks))
    known = {o: how for o, how in ended.items() if o < cut}
    again = stream(cfgs, sizes, groups=groups, seed=3)
    again.replay(*rows_of(tasks, batches, known, cut))
    drawn = [again.task(o) for o in range(cut)]
    for ordinal in range(cut, len(tasks)):
        assert again.ready(ordinal)
        drawn.append(again.task(ordinal))
        again.ended(ordinal, ended.get(ordinal, Ended(dropped=False)))
    assert drawn == tasks


def test_a_ledger_that_another_stream_wrote_is_refused() -> None:
    cfgs = [TasksConfig(source="a", minimum=1), TasksConfig(source="b")]
    draws = stream(cfgs, [9, 9], groups=2)
    fates = by_luck(0, 0.0)
    tasks, batches, ended = drive(draws, fates, groups=2, steps=2, order=random.Random(0))
    prompts, rows = rows_of(tasks, batches, ended, 4)
    prompts[2] = replace(prompts[2], taskset="9")
    with pytest.raises(ContractError, match="ordinal 2 was of task set 9 before the crash"):
        stream(cfgs, [9, 9], groups=2).replay(prompts, rows)


# --------------------------------------------------------------------------- curricula


def test_a_set_that_is_solved_gives_its_draws_to_the_others_and_its_minimum_with_them() -> None:
    """Two tasks that always pass and one that never does; nothing is drawn twice once retired."""
    easy = TasksConfig(source="a", minimum=1, curriculum=CurriculumConfig())
    draws = stream([easy, TasksConfig(source="b")], [2, 50], groups=2)

    def fate(ordinal: int, task: Task) -> Ended:
        return Ended(dropped=False, passed=8 if task.taskset == "0" else 2, scored=8)

    tasks, _, _ = drive(draws, fate, groups=2, steps=12, order=random.Random(1))
    easy_draws = [i for i, task in enumerate(tasks) if task.taskset == "0"]
    assert len(easy_draws) < 8 and max(easy_draws) < 16
    assert {tasks[i].id for i in easy_draws} == {"0", "1"}
    assert draws.retired() == {"0": 2}


def test_when_all_is_retired_the_run_ends_with_the_reason() -> None:
    cfg = TasksConfig(source="a", curriculum=CurriculumConfig(retire=0.8))
    draws = stream([cfg], [3], groups=1)
    with pytest.raises(DataError, match="no task is left to draw: 3 tasks passed and are retired"):
        drive(
            draws,
            lambda ordinal, task: Ended(dropped=True, passed=8, scored=8),
            groups=1,
            steps=9,
            order=random.Random(0),
        )


def test_two_sets_of_one_run_are_not_drawn_in_the_same_order() -> None:
    cfgs = [TasksConfig(source=s, curriculum=CurriculumConfig()) for s in "ab"]
    draws = stream(cfgs, [50, 50], groups=20)
    assert all(draws.ready(i) for i in range(20))
    ids = [[draws.task(i).id for i in range(20) if draws.task(i).taskset == s] for s in "01"]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("minimum", [0, 1])
def test_a_set_of_ratio_0_is_never_drawn(minimum: int) -> None:
    cfgs = [
        TasksConfig(source="a"),
        TasksConfig(source="b", ratio=0),
        TasksConfig(source="c", ratio=3, minimum=minimum),
    ]
    mix = Mix([Numbers(cfg.source, 50) for cfg in cfgs], [cfg.ratio for cfg in cfgs])
    draws = Draws(mix, cfgs, groups_per_step=4)
    names = []
    for ordinal in range(16):
        assert draws.ready(ordinal)
        names.append(draws.task(ordinal).taskset)
        draws.ended(ordinal, Ended(dropped=False))
    assert (names.count("a"), names.count("b"), names.count("c")) == (4, 0, 12)


def test_a_curriculum_needs_a_set_that_can_be_counted_and_rates_that_make_sense() -> None:
    cfg = TasksConfig(source="a", curriculum=CurriculumConfig())
    with pytest.raises(ConfigError, match=r"tasks\.0\.curriculum.*can be counted"):
        Draws(Mix([Numbers("a", 5, shy=True)]), [cfg])
    with pytest.raises(ConfigError, match="low <= high <= retire"):
        stream([TasksConfig(source="a", curriculum=CurriculumConfig(low=0.9))], [5], groups=1)


# --------------------------------------------------------------------------- settings


def test_minima_that_no_step_can_hold_or_nobody_reads_are_refused() -> None:
    two = (TasksConfig(source="a", minimum=2), TasksConfig(source="b", minimum=3))
    with pytest.raises(ConfigError, match="add up to 5 groups, and a step has 4"):
        RunConfig(tasks=two, rollout=RolloutConfig(groups_per_step=4))
    with pytest.raises(ConfigError, match="no other task set"):
        RunConfig(tasks=(TasksConfig(source="a", minimum=1),))


def test_a_curriculum_can_be_switched_on_at_the_command_line() -> None:
    base = RunConfig(tasks=(TasksConfig(source="a"),))
    found = override(base, ["tasks.0.curriculum={}", "tasks.0.curriculum.retire=0.95"])
    assert found.tasks[0].curriculum == CurriculumConfig(retire=0.95)
