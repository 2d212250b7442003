"""Advantages against reference values, by hand, under invariances and in hazards."""

from __future__ import annotations

import math
import random
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.advantage.conftest import said, seen
from treadle.advantage import (
    ESTIMATORS,
    GROUP_RELATIVE,
    Estimator,
    advantages,
    group_stats,
    teaches,
    zero_variance,
)
from treadle.errors import ConfigError, ContractError
from treadle.types import Group, Node, Status, Trajectory

Groups = Callable[..., Group]
Trajectories = Callable[..., Trajectory]


RELATIVE = sorted(GROUP_RELATIVE)


def values(groups: list[Group], estimator: str) -> list[float]:
    found = advantages(groups, estimator, weights={"score": 1.0}).values()
    assert all(isinstance(value, float) for value in found)
    return [value for value in found if isinstance(value, float)]


# --------------------------------------------------------------------------- reference


def test_rloo_gives_the_reference_values(group: Groups) -> None:
    groups = [group(0, [6, 3]), group(1, [9, 12]), group(2, [1])]
    assert values(groups, "rloo") == pytest.approx([3, -3, -3, 3, 0])


def test_grpo_divides_by_the_unbiased_deviation(group: Groups) -> None:
    groups = [group(0, [6, 3]), group(1, [9, 12])]
    root = 1 / math.sqrt(2)
    assert values(groups, "grpo") == pytest.approx([root, -root, -root, root], abs=1e-6)


def test_group_mean_gives_the_reference_values(group: Groups) -> None:
    groups = [group(0, [6, 3]), group(1, [9, 12])]
    assert values(groups, "group_mean") == pytest.approx([1.5, -1.5, -1.5, 1.5])


def test_one_success_in_four_by_every_estimator(group: Groups) -> None:
    groups = [group(0, [1, 0, 0, 0])]
    assert values(groups, "grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert values(groups, "rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_the_mean_is_over_the_whole_group(group: Groups) -> None:
    """B039: statistics of the first rollout alone still "sort of work"."""
    assert values([group(0, [1, 0, 0, 0])], "group_mean") == pytest.approx([0.75, *[-0.25] * 3])


# --------------------------------------------------------------------------- who counts


def test_an_unscored_trajectory_leaves_the_baseline_and_gets_no_advantage(group: Groups) -> None:
    """B033: an unscored reward is not 0."""
    out = advantages([group(0, [1, None, 0, 1])], "group_mean")
    assert out == pytest.approx({"0/0": 1 / 3, "0/2": -2 / 3, "0/3": 1 / 3})


def test_a_trajectory_without_trained_tokens_does_not_shift_its_sibling(
    group: Groups, trajectory: Trajectories
) -> None:
    """B037: rewards [100, 1] with [0, 2] trained tokens."""
    empty = trajectory(0, 0, 100.0, trained=0)
    out = advantages([group(0, [empty, trajectory(0, 1, 1.0)])], "group_mean")
    assert out == {"0/1": 0.0}


def test_uneven_groups_keep_their_own_baseline_and_branches_count_once(
    group: Groups, trajectory: Trajectories
) -> None:
    """B038: A = [1, 1, 0] (one lost), B = [0, 0, 0, 1]; one rollout of A has three branches."""
    a = [trajectory(0, 0, 1.0, branches=3), trajectory(0, 1, 1.0), trajectory(0, 2, 0.0)]
    out = advantages([group(0, a), group(1, [0, 0, 0, 1])], "group_mean")
    assert out["0/0"] == pytest.approx(1 - 2 / 3)
    assert out["0/2"] == pytest.approx(-2 / 3)
    assert out["1/3"] == pytest.approx(1 - 1 / 4)


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_failed_and_aborted_trajectories_are_left_out_whatever_their_reward(
    group: Groups, trajectory: Trajectories, status: Status
) -> None:
    """B040: a rollout that failed is counted, and statistics ignore it."""
    groups = [group(0, [trajectory(0, 0, 1.0, status=status), 1.0, 0.0])]
    assert advantages(groups, "group_mean") == {"0/1": 0.5, "0/2": -0.5}
    assert group_stats(groups)["advantage/left_out_trajectories"] == 1


def test_a_truncated_trajectory_counts(group: Groups, trajectory: Trajectories) -> None:
    groups = [group(0, [trajectory(0, 0, 1.0, status=Status.TRUNCATED), 0.0])]
    assert advantages(groups, "group_mean") == {"0/0": 0.5, "0/1": -0.5}


# --------------------------------------------------------------------------- degenerate groups


@pytest.mark.parametrize("estimator", RELATIVE)
@pytest.mark.parametrize("rewards", [[1.0], [1.0, None], [3.5] * 4, [0.1 + 0.2, 0.3], [0.0] * 3])
def test_a_singleton_or_constant_group_gets_exactly_zero(
    group: Groups, estimator: str, rewards: list[float | None]
) -> None:
    """B035: never the raw reward, never NaN, by no estimator; also beside groups that differ."""
    out = values([group(0, rewards)], estimator)
    assert out == [0.0] * len(out)
    assert values([group(0, rewards), group(1, [1, 0, 0])], estimator)[: len(out)] == out
    assert zero_variance(group(0, rewards))
    assert not teaches(group(0, rewards), estimator, {"score": 1.0})


def test_rewards_that_differ_a_little_are_not_equal(group: Groups) -> None:
    assert not zero_variance(group(0, [0.5, 0.501]))
    assert not zero_variance(group(0, [0.0, 1e-9]))


def test_degenerate_groups_are_counted_apart(group: Groups) -> None:
    groups = [group(0, [1.0, None]), group(1, [None]), group(2, [1, 1, 1]), group(3, [0, 1])]
    assert group_stats(groups) == {
        "advantage/groups": 4,
        "advantage/singleton_groups": 1,
        "advantage/empty_groups": 1,
        "advantage/zero_variance_groups": 1,
        "advantage/left_out_trajectories": 2,
    }


# --------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("estimator", [e for e in RELATIVE if "pp" not in e])
def test_every_group_sums_to_zero(group: Groups, estimator: str) -> None:
    rng = random.Random(0)
    for ordinal in range(50):
        rewards = [rng.choice([0, 1.0, rng.uniform(0, 100)]) for _ in range(rng.randint(1, 9))]
        out = values([group(ordinal, rewards), group(99, [0, 3])], estimator)[:-2]
        assert math.fsum(out) == pytest.approx(0, abs=1e-9 * max(1.0, *map(abs, out)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_trajectories_and_of_groups_does_not_matter(
    group: Groups, trajectory: Trajectories, estimator: str
) -> None:
    members = [trajectory(0, i, r) for i, r in enumerate([0.1, 0.7, 0.3, 1.0])]
    other = group(1, [1, 0])
    weights = {"score": 1.0}
    there = advantages([group(0, members), other], estimator, weights=weights)
    back = advantages([other, group(0, members[::-1])], estimator, weights=weights)
    assert there == back


@pytest.mark.parametrize("estimator", [e for e in RELATIVE if e != "maxrl"])
def test_adding_a_constant_to_all_rewards_of_a_group_changes_nothing(
    group: Groups, estimator: str
) -> None:
    plain = values([group(0, [0.0, 1.0, 0.5]), group(1, [0, 1])], estimator)
    shifted = values([group(0, [7.0, 8.0, 7.5]), group(1, [0, 1])], estimator)
    assert plain == pytest.approx(shifted, abs=1e-9)


@pytest.mark.parametrize("estimator", ["reinforce_batch_mean", "reinforce_pp"])
def test_a_constant_in_all_rewards_of_the_batch_cancels(group: Groups, estimator: str) -> None:
    plain = values([group(0, [0.0, 1.0]), group(1, [0.5])], estimator)
    assert values([group(0, [7.0, 8.0]), group(1, [7.5])], estimator) == pytest.approx(plain)


@pytest.mark.parametrize(
    "estimator", ["grpo", "maxrl", "batch_std", "gdpo", "reinforce_pp", "reinforce_pp_baseline"]
)
@pytest.mark.parametrize("factor", [0.01, 250.0])
def test_the_unit_of_the_reward_does_not_matter_where_it_is_divided_out(
    group: Groups, estimator: str, factor: float
) -> None:
    rewards = [[0.0, 1.0, 0.5], [2.0, 0.25]]
    plain = values([group(i, r) for i, r in enumerate(rewards)], estimator)
    scaled = [group(i, [factor * x for x in r]) for i, r in enumerate(rewards)]
    assert values(scaled, estimator) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("estimator", ["group_mean", "rloo", "opo", "reinforce"])
def test_the_others_are_in_reward_units(group: Groups, estimator: str) -> None:
    plain = values([group(0, [0.0, 1.0, 0.5])], estimator)
    doubled = values([group(0, [0.0, 2.0, 1.0])], estimator)
    assert doubled == pytest.approx([2 * a for a in plain])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_splitting_a_rollout_into_branches_changes_nothing(
    group: Groups, trajectory: Trajectories, estimator: str
) -> None:
    """A rollout counts once, and its tokens are its tokens."""

    def batch(branches: int) -> list[Group]:
        first = trajectory(0, 0, 1.0, trained=6 // branches, branches=branches)
        second = trajectory(0, 1, 0.0, trained=4)
        return [group(0, [first, second, trajectory(0, 2, 0.25)]), group(1, [0.5, 1.0])]

    assert values(batch(3), estimator) == values(batch(1), estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_observations_have_no_weight(
    group: Groups, trajectory: Trajectories, estimator: str
) -> None:
    def batch(observed: int) -> list[Group]:
        first = trajectory(0, 0, 1.0, trained=6, observed=observed)
        return [group(0, [first, trajectory(0, 1, 0.0)]), group(1, [0.5, 1.0])]

    assert values(batch(1), estimator) == values(batch(1000), estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_sampled_turn_that_is_not_trained_has_no_weight(
    group: Groups, trajectory: Trajectories, estimator: str
) -> None:
    """One that its reader never got, say."""

    def batch(*more: Node) -> list[Group]:
        nodes = [seen(0, None, 1), said(1, 0, 6), *more]
        first = trajectory(0, 0, 1.0, nodes=nodes)
        return [group(0, [first, trajectory(0, 1, 0.0)]), group(1, [0.5, 1.0])]

    assert values(batch(said(2, 1, 90, trained=False)), estimator) == values(batch(), estimator)


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "opo" and "pp" not in e])
def test_length_matters_to_no_estimator_that_does_not_say_so(
    group: Groups, trajectory: Trajectories, estimator: str
) -> None:
    long = group(0, [trajectory(0, 0, 1.0, trained=60), trajectory(0, 1, 0.0), 0.25])
    assert values([long], estimator) == values([group(0, [1.0, 0.0, 0.25])], estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_better_reward_gets_a_larger_advantage(group: Groups, estimator: str) -> None:
    low, high = values([group(0, [0.0, 1.0])], estimator)
    assert low < high
    assert low < 0 < high or estimator in ("reinforce", "reinforce_running", "gae")


# --------------------------------------------------------------------------- one per task


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - GROUP_RELATIVE))
def test_without_a_group_baseline_one_rollout_per_task_teaches(
    group: Groups, estimator: str
) -> None:
    groups = [group(0, [1.0]), group(1, [0.0]), group(2, [0.25])]
    first, second, third = values(groups, estimator)
    assert first > third > second
    assert all(teaches(g, estimator) for g in groups)
    assert teaches(group(0, [1, 1, 1]), estimator)
    assert not teaches(group(0, [None, None]), estimator)


def test_the_docs_have_every_estimator_and_say_which_work_with_one_rollout_per_task() -> None:
    page = (Path(__file__).parents[2] / "docs" / "advantages.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.count("|") == 5]
    named = {row[1].strip(" `"): row[3].strip() for row in rows[2:]}
    assert named == {e: "no" if e in GROUP_RELATIVE else "yes" for e in ESTIMATORS}


# --------------------------------------------------------------------------- hazards


def broken(name: str, of_group: Callable[[typing.Any], list[float]]) -> Estimator:
    """The estimator of that name with its numbers made by `of_group`."""
    return replace(
        ESTIMATORS[name], of_batch=lambda groups, baseline, weights: [of_group(g) for g in groups]
    )


def test_a_sum_that_is_not_zero_stops_the_run(
    group: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B039: the check runs on every call, not in tests alone."""
    first_only = broken("group_mean", lambda g: [r - g.rewards[0] for r in g.rewards])
    monkeypatch.setitem(ESTIMATORS, "group_mean", first_only)
    with pytest.raises(ContractError, match=r"group 7 .*sum to -3, expected 0"):
        advantages([group(7, [1, 0, 0, 0])], "group_mean")


def test_a_sum_over_tokens_that_is_not_zero_stops_the_run(
    group: Groups, trajectory: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPO promises it of its advantages times its tokens."""
    unweighted = broken("opo", lambda g: [r - sum(g.rewards) / 2 for r in g.rewards])
    monkeypatch.setitem(ESTIMATORS, "opo", unweighted)
    with pytest.raises(ContractError, match=r"by `opo` sum to 1, expected 0"):
        advantages([group(0, [trajectory(0, 0, 1.0, trained=4), 0.0])], "opo")


@pytest.mark.parametrize("estimator", ["group_mean", "reinforce", "reinforce_pp"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_estimator_that_returns_no_number_stops_the_run(
    group: Groups, monkeypatch: pytest.MonkeyPatch, estimator: str, bad: float
) -> None:
    monkeypatch.setitem(ESTIMATORS, estimator, broken(estimator, lambda g: [bad, -bad]))
    with pytest.raises(ContractError, match="not all finite"):
        advantages([group(0, [1, 0])], estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_its_trajectory(
    group: Groups, estimator: str, bad: float
) -> None:
    with pytest.raises(ContractError, match=r"trajectory 0/1 of group 0 has reward"):
        values([group(0, [1.0, bad])], estimator)


def test_a_trajectory_that_comes_twice_is_refused(group: Groups) -> None:
    with pytest.raises(ContractError, match="0/0 is in the batch twice"):
        advantages([group(0, [1, 0]), group(0, [1, 0])], "group_mean")


def test_an_unknown_estimator_suggests_the_nearest(group: Groups) -> None:
    with pytest.raises(ConfigError, match="did you mean `rloo`"):
        advantages([group(0, [1, 0])], "rlo")
