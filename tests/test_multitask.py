"""Several task sets in one run: minima, curricula, left-out groups and flagged spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.test_loop import Crash, small, tasks  # noqa: F401 - a fixture
from treadle.api import run_config
from treadle.config import (
    CreditConfig,
    CurriculumConfig,
    LearnConfig,
    RolloutConfig,
    ScheduleConfig,
    TasksConfig,
)
from treadle.evals.definitions import define, definitions
from treadle.evals.report import as_text, summarise
from treadle.store import Store


def odd(trajectory):
    """0 or 1, by what was sampled."""
    return float(sum(map(ord, trajectory.answer)) % 2)


def graded(trajectory):
    """Many values, so that groups differ in how far they spread."""
    return (sum(map(ord, trajectory.answer)) % 17) / 17


def first_token_flagged(trajectory):
    turn = trajectory.nodes[-1]
    return {"score": odd(trajectory), "flagged": [(turn.id, 0, 1)]}


def two_sets(tasks, **changes):  # noqa: F811
    config = small(
        tasks,
        steps=5,
        rollout=RolloutConfig(group_size=4, groups_per_step=3, max_new_tokens=6),
        learn=LearnConfig(lr=1e-3),
    )
    sets = (
        TasksConfig(source=f"jsonl:{tasks}", ratio=5.0, curriculum=CurriculumConfig()),
        TasksConfig(source=f"jsonl:{tasks}", system="Be brief.", minimum=1),
    )
    return replace(config, **({"tasks": sets} | changes))


def drawn(run):
    return {p.ordinal: (p.taskset, p.task_id) for p in run.prompts()}


def test_after_a_crash_the_same_ordinals_get_the_same_tasks_and_every_step_its_minimum(
    tasks,  # noqa: F811
    tmp_path,
):
    """A curriculum, a minimum and groups that are dropped; re-formed from the ledger alone."""
    config = two_sets(tasks)
    run_config(config, tmp_path / "whole", reward=odd)

    def crash(kind, data):
        if kind == "group" and data["group"].ordinal == 8:
            raise Crash

    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=odd, observer=crash)
    run_config(config, tmp_path / "parts", reward=odd, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        assert drawn(whole) == drawn(parts)
        assert [s.ordinals for s in whole.steps()] == [s.ordinals for s in parts.steps()]
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            assert a.metrics["grad/norm"] == b.metrics["grad/norm"]
        sets = drawn(whole)
        second = f"jsonl:{tasks}#2"
        for step in whole.steps():
            trained = Counter(sets[o][0] for o in step.ordinals)
            assert trained[second] >= 1
            assert step.metrics[f"tasks/{second}_trained_groups"] == trained[second]
        report = summarise(whole)
        names = {m.name for m in whole.metrics()}
    assert [n for n in names if define(n, definitions()) is None] == []
    first = report["tasksets"][f"jsonl:{tasks}"]
    assert first["retired"] is not None and report["tasksets"][second]["retired"] is None
    assert 0 <= first["solved_frac"] <= 1
    assert "task set" in as_text(report) and "retired" in as_text(report)


@pytest.mark.parametrize("eta", [0, 1])
def test_groups_of_little_spread_are_consumed_and_left_out_with_the_reason(
    tasks,  # noqa: F811
    tmp_path,
    eta,
):
    """Each step takes N groups and trains fewer; their places come back, no step is short and no
    group starts by weights that are about to change."""
    config = replace(
        two_sets(tasks, learn=LearnConfig(spread_keep=0.6)),
        rollout=RolloutConfig(group_size=4, groups_per_step=4, max_new_tokens=6),
        schedule=ScheduleConfig(eta=eta, max_lag=2 * eta),
    )
    run_config(config, tmp_path / "run", reward=graded)
    with Store.open(tmp_path / "run", readonly=True) as store:
        prompts = {p.ordinal: p for p in store.prompts()}
        steps = store.steps()
        assert len(steps) == 5
        for step in steps:
            assert len(step.ordinals) == 4
            left = [o for o in step.ordinals if prompts[o].reason]
            assert step.metrics["groups/left_out"] == len(left)
            assert step.metrics["groups/trained"] == 4 - len(left)
            rows = {s.ordinal for s in store.samples_of_step(step.step)}
            assert rows == set(step.ordinals) - set(left)
            assert step.metrics["lag/max_versions"] <= 2 * eta
            kept = Counter(prompts[o].taskset for o in step.ordinals if o not in left)
            if eta == 0:
                assert kept[f"jsonl:{tasks}#2"] >= 1, "the filter respects the minimum"
        total = sum(s.metrics["groups/left_out"] for s in steps)
        assert total > 0
        groups = summarise(store)["groups"]
    assert groups["left_out"] == total and groups["trained"] == 20 - total
    assert groups["waiting"] == groups["in_flight"] == 0, "a group was made that no step trains"
    assert sum(n for reason, n in groups["reasons"].items() if "spread" in reason) == total


def test_a_running_baseline_is_of_the_task_sets_that_subtract_it(tasks, tmp_path):  # noqa: F811
    """Another set's easy tasks would make every rollout of this one look bad."""
    config = two_sets(tasks, learn=LearnConfig(lr=1e-3, advantage="reinforce_running"))
    sets = (replace(config.tasks[0], curriculum=None), replace(config.tasks[1], algorithm="grpo"))
    config = replace(config, tasks=sets, steps=2)
    run_config(config, tmp_path / "run", reward=odd)
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps = store.steps()
        of_step = [
            [
                t.reward.value
                for group in store.groups()
                if group.ordinal in step.ordinals and group.task.taskset == f"jsonl:{tasks}"
                for t in group.scored
            ]
            for step in steps
        ]
    first, second = (sum(values) / len(values) for values in of_step)
    found = [step.metrics["advantage/policy_baseline"] for step in steps]
    assert found == pytest.approx([first, 0.95 * first + 0.05 * second])


def test_spans_that_a_reward_flags_reach_the_rows_through_worker_and_ledger(
    tasks,  # noqa: F811
    tmp_path,
):
    """The first token of a good run is not trained, that of a bad one weighs twice."""
    config = small(tasks, steps=2, learn=LearnConfig(credit=CreditConfig(span_blame=2.0)))

    def crash(kind, data):
        if kind == "step" and data["step"] == 1:
            raise Crash

    run_config(config, tmp_path / "whole", reward=first_token_flagged)
    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=first_token_flagged, observer=crash)
    run_config(config, tmp_path / "parts", reward=first_token_flagged, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        rows = whole.samples_of_step(1)
        masked = 0
        for row in rows:
            (t,) = [t for t in whole.group(row.ordinal).trajectories if t.id == row.trajectory_id]
            at = len(row.ids) - len(t.nodes[-1].ids)
            known = [a for a, on in zip(row.advantages, row.trained, strict=True) if on]
            if row.trained[at]:
                assert row.advantages[at] == 2 * known[-1] < 0 or len(known) == 1
            else:
                masked += 1
                assert all(a > 0 for a in known)
        assert masked == whole.steps()[0].metrics["credit/masked_tokens"] > 0
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            assert a.metrics["grad/norm"] == b.metrics["grad/norm"] > 0


def test_a_quality_that_no_reward_has_is_told(tasks, tmp_path, caplog):  # noqa: F811
    config = small(tasks, steps=1, learn=LearnConfig(credit=CreditConfig(quality="elegance")))
    run_config(config, tmp_path / "run", reward=odd)
    assert any("learn.credit.quality names a part" in r.message for r in caplog.records)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.steps()[0].metrics["credit/judged_groups"] == 0
