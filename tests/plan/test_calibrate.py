"""What an earlier run says: read from a real store."""

from dataclasses import replace

import pytest

from tests.store.run_builders import PROVENANCE, make_failed, make_group, make_task
from treadle.config import RolloutConfig, RunConfig, ScheduleConfig
from treadle.errors import DataError
from treadle.plan.calibrate import calibrate
from treadle.store import Span, Store


def run_with(path, groups: int, *, failed: int = 0, spans: bool = True):
    """Groups of 2 whose rollouts take 1 s and `ordinal` + 1 s; failed ones take 99 s."""
    config = RunConfig(
        rollout=RolloutConfig(group_size=2, groups_per_step=3),
        schedule=ScheduleConfig(eta=1, max_lag=2),
    )
    with Store.create(path, config, provenance=PROVENANCE) as store:
        for ordinal in range(groups + failed):
            store.start_group(ordinal, make_task(ordinal))
            group = make_group(ordinal)
            one, two = group.trajectories
            if ordinal >= groups:
                two = replace(make_failed(ordinal, 1), duration_s=99.0)
            rollouts = (replace(one, duration_s=1.0), replace(two, duration_s=two.duration_s))
            if ordinal < groups:
                rollouts = (rollouts[0], replace(two, duration_s=ordinal + 1.0))
            store.publish_group(replace(group, trajectories=rollouts))
        if spans:
            store.add_spans(
                [
                    Span(step=step, stage=stage, started_at=0.0, duration_s=seconds)
                    for step in (1, 2, 3)
                    for stage, seconds in (("generate", 50.0), ("train", step), ("commit", 0.5))
                ]
            )
    return path


def test_whole_groups_stay_together_and_training_is_train_and_commit(tmp_path):
    found = calibrate(run_with(tmp_path / "a", 40, failed=3))
    assert (found.group, found.batch, found.concurrency) == (2, 6, 12)
    assert found.train_s == 2.5
    assert found.durations.groups_s is not None and found.durations.groups_s.shape == (40, 2)
    assert found.durations.mean_s == pytest.approx((1 + sum(range(1, 41)) / 40) / 2)
    assert found.durations.mean_longest_s(2) == pytest.approx(sum(range(1, 41)) / 40)
    assert found.durations.quantile(1.0) == 40  # the failed ones' 99 s are not among them


def test_few_groups_are_taken_rollout_by_rollout(tmp_path):
    found = calibrate(run_with(tmp_path / "a", 10))
    assert found.durations.groups_s is None
    assert "20 rollouts" in found.durations.text


@pytest.mark.parametrize(("groups", "spans"), [(4, True), (40, False)])
def test_a_run_that_has_too_little_to_say_is_refused(tmp_path, groups, spans):
    with pytest.raises(DataError, match="finished rollouts and") as error:
        calibrate(run_with(tmp_path / "a", groups, spans=spans))
    assert "--durations" in error.value.hint
